"""The commands `studies`: list, show, delete, archive."""

import logging
import sys
from collections.abc import Sequence

import click

from autotune.cli.context import Options
from autotune.cli.visible import visible
from autotune.machine.agent import Agent
from autotune.results import study_report
from autotune.results.evidence import trials_behind
from storage.annotation import Annotation
from storage.deletion import Deletion, Use
from storage.errors import DatabaseDamaged, DatabaseUnavailable
from storage.reading import read_store
from storage.records import StudyRecord
from storage.store import Store
from trials import wire

_log = logging.getLogger(__name__)


def list_studies(options: Options, *, model: str | None, tag: str | None, archived: bool, top: int | None) -> None:
    with read_store(options.database_url()) as store:
        winners = {best.study_id: best for best in store.best_plans(model_name=model, archived=archived)}
        annotations = store.annotations("study")
        found = [
            study_report.Listed(
                study=study,
                work=best.workload if best else study.named(store.workload(study.workload_fingerprint)),
                best=best,
                annotation=annotations.get(study.id, Annotation()),
            )
            for study in store.studies(model_name=model, tag=tag, archived=archived, limit=top)
            for best in (winners.get(study.id),)
        ]
        stored = len(found) or len(store.studies(archived=True))
    options.give(
        lambda: {"studies": [study_report.study_document(each) for each in found]},
        lambda: study_report.studies_text(found, stored),
    )


def show_study(options: Options, name: str, **of_list: object) -> None:
    """Show one study; refuse the options `of_list`, unless they are absent."""
    if given := [f"--{option}" for option, value in of_list.items() if value not in (None, False)]:
        raise click.UsageError(f"STUDY names one study; remove it, or {', '.join(given)}, which list several")
    with read_store(options.database_url()) as store:
        study = store.find_study(name)
        work, trials = study.named(store.workload(study.workload_fingerprint)), store.trials(study.id)
        annotation = store.annotations("study", [study.id]).get(study.id, Annotation())
        try:
            winner = store.winner(study.id)
        except DatabaseDamaged as error:  # the study and its trials can still be shown
            _log.warning("the winner of %s is left out: %s", study.name, error)
            winner = None
        behind = trials_behind(winner, store) if winner else ()
        agents = store.agents()
    found = study_report.Listed(study=study, work=work, best=winner, annotation=annotation)
    options.give(
        lambda: {**study_report.study_document(found, behind), "trials": [wire.to_document(trial) for trial in trials]},
        lambda: study_report.study_text(found, trials, behind, agents),
    )


def delete_studies(options: Options, names: Sequence[str], *, is_confirmed: bool) -> None:
    """Delete studies, after a question on a terminal unless `is_confirmed`. Raise StudyInUse."""
    with read_store(options.database_url()) as store:
        ids = [study.id for study in _found(store, names)]
        planned = store.deletion(ids)
        gone = _gone(store, planned.uses)
        if not is_confirmed:
            _confirm(options, planned)
        done = store.delete_studies(ids, gone)
        _delete_from_optuna(store, done.studies)
    document = wire.to_document(done)
    options.give(
        lambda: {name: value for name, value in document.items() if name != "uses"},
        lambda: f"Deleted {done}",
    )


def archive_studies(options: Options, names: Sequence[str], *, is_undone: bool) -> None:
    """Archive studies, or undo it. Raise StudyInUse."""
    with read_store(options.database_url()) as store:
        found = _found(store, names)
        ids = [study.id for study in found]
        if is_undone:
            store.unarchive_studies(ids)
        else:
            store.archive_studies(ids, _gone(store, store.searches(ids)))
    done, as_before = ("No longer archived", "Was not archived") if is_undone else ("Archived", "Was archived already")
    listed = {
        done: [study.name for study in found if (study.archived is not None) == is_undone],
        as_before: [study.name for study in found if (study.archived is not None) != is_undone],
    }
    options.give(
        lambda: {"studies": [study.name for study in found], "archived": not is_undone},
        lambda: "\n".join(f"{what}: {', '.join(names)}" for what, names in listed.items() if names),
    )


def _found(store: Store, names: Sequence[str]) -> list[StudyRecord]:
    """Return the named studies, each once."""
    found = {study.id: study for study in map(store.find_study, names)}
    return list(found.values())


def _gone(store: Store, uses: Sequence[Use]) -> list[str]:
    """Return the ids of the agents that are gone. Their heartbeats are awaited where their processes are not seen."""
    ids = {use.agent.id for use in uses}
    if not ids:
        return []
    with Agent(store) as agent:
        agent.another(ids)
        return [each for each in sorted(ids) if agent.is_gone(each)]


def _confirm(options: Options, planned: Deletion) -> None:
    options.display.close()
    text = visible(f"This deletes {planned}")
    if not sys.stdin.isatty():
        raise click.UsageError(f"{text}\nNothing was deleted, since there is no terminal to ask on; give --yes")
    click.echo(text, err=True)
    if not options.ask("Delete?"):
        raise click.Abort


def _delete_from_optuna(store: Store, names: Sequence[str]) -> None:
    from autotune.search.sampling.proposals import delete_studies  # it takes a second to import

    try:
        delete_studies(store.optuna_url, store.exclusive(), names)
    except DatabaseUnavailable as error:  # only the dashboard shows them
        _log.warning("Optuna's copies of %s stay, delete them with its dashboard: %s", ", ".join(names), error)
