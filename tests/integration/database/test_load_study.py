"""A search as Optuna itself reads it, also while it runs and without the right to write."""

from pathlib import Path

import optuna
import pytest
from optuna.exceptions import StorageInternalError
from optuna.trial import TrialState

from autotune.search.sampling.proposals import database
from storage.records import FinishedTrial
from storage.store import open_store
from tests.machines.search_bench import PREDICTOR, Bench
from tests.machines.simulated import SimulatedLauncher


def read_only(url: str) -> str:
    """Return the URL by which docs/how-to/optuna.md reads a database."""
    if url.startswith("sqlite:///"):
        return f"{url.replace('sqlite:///', 'sqlite:///file:')}?mode=ro&uri=true"
    return f"{url}{'&' if '?' in url else '?'}options=-c%20default_transaction_read_only%3Don"


@pytest.mark.parametrize("database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)], indirect=True)
def test_optuna_reads_a_search_by_name_while_it_runs_and_cannot_change_it(database_url: str, tmp_path: Path) -> None:
    seen: list[int] = []
    with open_store(database_url) as store:
        bench, url = Bench(tmp_path, store), read_only(store.optuna_url)
        study = bench.study()

        def look(_: FinishedTrial) -> None:
            with database(url) as storage:
                seen.append(len(optuna.load_study(study_name=study.name, storage=storage).trials))

        bench.on_end = look
        bench.search(study, SimulatedLauncher(PREDICTOR), trials=6)
        stored = {trial.id: trial for trial in bench.stored(study)}
    assert seen == sorted(seen)
    assert (seen[0], seen[-1] > 5) == (0, True)
    with database(url) as storage:
        assert optuna.get_all_study_names(storage) == [study.name]
        found = optuna.load_study(study_name=study.name, storage=storage)
        assert (found.direction.name, found.metric_names) == ("MINIMIZE", ["epoch seconds"])
        trials = [trial for trial in found.trials if "trial_id" in trial.user_attrs]
        best = found.best_value
        with pytest.raises(StorageInternalError):
            found.set_user_attr("mine", 1)
    assert {trial.user_attrs["trial_id"] for trial in trials} == stored.keys()
    for trial in trials:
        ours = stored[trial.user_attrs["trial_id"]]
        assert (trial.state, trial.value) == (TrialState.COMPLETE, ours.result.epoch_seconds)
        assert (trial.user_attrs["role"], trial.user_attrs["plan"]) == (ours.role, ours.plan.id)
        assert trial.params.items() >= ours.parameters.items()
    assert best == min(trial.value for trial in trials if trial.value is not None)
