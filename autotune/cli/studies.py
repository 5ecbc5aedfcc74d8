"""The command `studies`."""

import logging

from autotune import study_report
from autotune.cli.context import Options
from storage.errors import DatabaseDamaged
from storage.store import open_store
from trials import wire

_log = logging.getLogger(__name__)


def list_studies(options: Options, *, model: str | None, top: int | None) -> None:
    with open_store(options.database_url()) as store:
        winners = {best.study_id: best for best in store.best_plans(model_name=model)}
        found = [
            (study, best.workload if best else store.workload(study.workload_fingerprint), best)
            for study in store.studies(model_name=model, limit=top)
            for best in (winners.get(study.id),)
        ]
    options.give(
        lambda: {"studies": [study_report.study_document(*each) for each in found]},
        lambda: study_report.studies_text(found),
    )


def show_study(options: Options, name: str) -> None:
    with open_store(options.database_url()) as store:
        study = store.find_study(name)
        work, trials = store.workload(study.workload_fingerprint), store.trials(study.id)
        try:
            winner = store.winner(study.id)
        except DatabaseDamaged as error:  # the study and its trials can still be shown
            _log.warning("the winner of %s is left out: %s", study.name, error)
            winner = None
    found = study, work, winner
    options.give(
        lambda: {**study_report.study_document(*found), "trials": [wire.to_document(trial) for trial in trials]},
        lambda: study_report.study_text(*found, trials),
    )
