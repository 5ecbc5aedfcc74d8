import sqlite3
from contextlib import closing
from dataclasses import replace
from math import inf, nan
from pathlib import Path

import pytest

from autotune.machine.agent import Agent
from autotune.search.execution.ledger import StudyLedger
from autotune.search.execution.run_result import RunResult
from autotune.search.roles import Role
from storage.records import FinishedTrial
from storage.spool import Spool
from storage.store import open_store
from tests.values.storage import PADDED_PLAN, WORKLOAD, completed, packed_plan, result_of
from trials.outcome import Failed


def test_what_a_run_gave_is_recorded_whole(tmp_path: Path) -> None:
    run_result = RunResult(
        outcome=completed(),
        epoch_seconds=12.5,
        epoch_seconds_error=0.5,
        disturbance="other processes used 1.3 of 2 cores",
        energy_joules=4567.8,
    )
    with open_store(f"sqlite:///{tmp_path}/tuning.db") as store:
        study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0)
        with Agent(store) as agent:
            ledger = StudyLedger(store, Spool(tmp_path / "spool"), study, agent, ())
            begun = ledger.begin(PADDED_PLAN, Role.SAMPLED, {})
            assert begun is not None
            trial = ledger.finish(begun, ledger.put(begun, run_result))
        assert store.trials(study.id) == (trial,)
    result = trial.result
    assert run_result == RunResult(
        outcome=result.outcome,
        epoch_seconds=result.epoch_seconds,
        epoch_seconds_error=result.epoch_seconds_error,
        disturbance=result.disturbance,
        energy_joules=result.energy_joules,
    )


def test_a_result_that_was_put_is_kept_even_if_its_trial_was_not_finished(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path / 'tuning.db'}") as store:
        study, spool = store.create_study(store.add_workload(WORKLOAD), {}, seed=0), Spool(tmp_path / "spool")
        with Agent(store) as agent:
            ledger = StudyLedger(store, spool, study, agent, ())
            begun = ledger.begin(PADDED_PLAN, Role.SAMPLED, {})
            assert begun is not None
            result = ledger.put(begun, RunResult(outcome=completed(), epoch_seconds=12.5, epoch_seconds_error=0.5))
        with Agent(store) as later:
            assert [trial.result for trial in StudyLedger(store, spool, study, later, ()).trials] == [result]


def test_trials_of_others_are_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    url = f"sqlite:///{tmp_path / 'tuning.db'}"
    with open_store(url) as store, Agent(store) as agent:
        study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0)
        ledger = StudyLedger(store, Spool(tmp_path / "spool"), study, agent, ())
        for plan in (PADDED_PLAN, packed_plan()):
            other = store.start_trial(study.id, plan, "sampled")
            store.finish_trial(result_of(other.id))
            assert [trial.id for trial in ledger.catch_up()[0]] == [other.id]
            with closing(sqlite3.connect(tmp_path / "tuning.db")) as database, database:
                database.execute("UPDATE autotune_outcome SET document = 'spoilt'")
        assert ledger.catch_up() == ([], [])
    assert not caplog.records


def test_a_result_is_stored_at_once_where_the_spool_cannot_be_written(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path / 'tuning.db'}") as store:
        study, spool = store.create_study(store.add_workload(WORKLOAD), {}, seed=0), Spool(tmp_path / "spool")
        with Agent(store) as agent:
            ledger = StudyLedger(store, spool, study, agent, ())
            begun = ledger.begin(PADDED_PLAN, Role.SAMPLED, {})
            assert begun is not None
            (tmp_path / "spool").rmdir()
            (tmp_path / "spool").touch()
            result = ledger.put(begun, RunResult(outcome=completed(), epoch_seconds=12.5, epoch_seconds_error=0.5))
        (trial,) = store.trials(study.id)
        assert isinstance(trial, FinishedTrial)
        assert trial.result == result


def test_a_measurement_that_cannot_be_kept_is_a_failed_trial(tmp_path: Path) -> None:
    measured = completed()
    unkept = replace(measured, measurement=replace(measured.measurement, losses=(nan, 1.0)))
    with open_store(f"sqlite:///{tmp_path / 'tuning.db'}") as store:
        study, spool = store.create_study(store.add_workload(WORKLOAD), {}, seed=0), Spool(tmp_path / "spool")
        with Agent(store) as agent:
            ledger = StudyLedger(store, spool, study, agent, ())
            for run_result in (
                RunResult(outcome=unkept, epoch_seconds=12.5, epoch_seconds_error=0.5),
                RunResult(outcome=measured, epoch_seconds=inf, epoch_seconds_error=nan),
            ):
                begun = ledger.begin(PADDED_PLAN, Role.CONFIRM, {})
                assert begun is not None
                outcome = ledger.finish(begun, ledger.put(begun, run_result)).result.outcome
                assert isinstance(outcome, Failed)
                assert "results cannot be stored" in str(outcome.cause)
        assert len(store.trials(study.id)) == 2


def test_a_result_that_another_trial_slot_stored_is_reported_once(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path / 'tuning.db'}") as store:
        study, spool = store.create_study(store.add_workload(WORKLOAD), {}, seed=0), Spool(tmp_path / "spool")
        with Agent(store) as agent:
            ledger = StudyLedger(store, spool, study, agent, ())
            begun = ledger.begin(PADDED_PLAN, Role.SAMPLED, {})
            assert begun is not None
            result = ledger.put(begun, RunResult(outcome=completed(), epoch_seconds=12.5, epoch_seconds_error=0.5))
            spool.replay(store)
            assert ledger.catch_up() == ([], [])
            assert ledger.open == (begun,)
            assert ledger.finish(begun, result) in ledger.trials
            assert len(ledger.trials) == 1
            assert ledger.catch_up() == ([], [])
