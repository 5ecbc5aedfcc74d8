from pathlib import Path

from autotune.agent import Agent
from autotune.search.ledger import Ledger
from autotune.search.runner import Attempt
from storage.spool import Spool
from storage.store import open_store
from tests.storage_values import PADDED_PLAN, WORKLOAD, completed


def test_what_an_attempt_gave_is_recorded_whole(tmp_path: Path) -> None:
    attempt = Attempt(
        outcome=completed(),
        epoch_seconds=12.5,
        epoch_seconds_error=0.5,
        contamination="other processes used 1.3 of 2 cores",
        energy_joules=4567.8,
    )
    with open_store(f"sqlite:///{tmp_path}/tuning.db") as store:
        study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0)
        with Agent(store) as agent:
            ledger = Ledger(store, Spool(tmp_path / "spool"), study, agent, ())
            begun = ledger.begin(PADDED_PLAN, "sampled", {})
            assert begun is not None
            trial = ledger.finish(begun, attempt)
        assert store.trials(study.id) == (trial,)
    result = trial.result
    assert attempt == Attempt(
        outcome=result.outcome,
        epoch_seconds=result.epoch_seconds,
        epoch_seconds_error=result.epoch_seconds_error,
        contamination=result.contamination,
        energy_joules=result.energy_joules,
    )
