"""Numbers that no database keeps are refused, and one that was stored before hides nothing else."""

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, text

from autotune.cli import main
from storage.errors import NotStorable
from storage.records import LaunchResult, TrialResult
from storage.spool import Spool
from storage.store import Store, open_store
from storage.upkeep.repair import repair
from tests.contracts.conftest import on_both_databases
from tests.values.storage import COSTS, NOON, WORKLOAD, best_of, changed, concluded, packed_plan, result_of
from trials import wire
from trials.errors import WireError
from trials.outcome import Completed


def study_of(store: Store) -> str:
    return store.create_study(store.add_workload(WORKLOAD), {}, seed=7).id


def spoiled(result: TrialResult, **numbers: Any) -> TrialResult:
    assert isinstance(result.outcome, Completed)
    return replace(result, outcome=Completed(measurement=replace(result.outcome.measurement, **numbers)))


SPOILS: dict[str, Callable[[TrialResult], TrialResult]] = {
    "a loss that is no number": lambda result: spoiled(result, losses=(nan, 1.0)),
    "an infinite loss": lambda result: spoiled(result, losses=(inf, 1.0)),
    "too many tokens": lambda result: spoiled(result, text_tokens=1 << 63),
    "infinite energy": lambda result: replace(result, energy_joules=inf),
    "no energy": lambda result: replace(result, energy_joules=nan),
}


@pytest.mark.parametrize("name", SPOILS)
def test_a_result_with_a_bad_number_is_refused_at_every_door(store: Store, tmp_path: Path, name: str) -> None:
    study, spool = study_of(store), Spool(tmp_path / "spool")
    trial = store.start_trial(study, packed_plan(), "sampled")
    result = SPOILS[name](result_of(trial.id))
    with pytest.raises(NotStorable, match=r"finite number|64 bits"):
        store.finish_trial(result)
    with pytest.raises(WireError, match=r"finite number|64 bits"):
        spool.put(result)
    assert spool.pending() == ()
    assert store.running_trials() == (trial,)


@pytest.mark.parametrize("number", ["NaN", "null", "1e999", f"{10**30}", f'"{10**30}"'])
def test_a_waiting_result_with_a_bad_number_is_set_aside(store: Store, tmp_path: Path, number: str) -> None:
    study, spool = study_of(store), Spool(tmp_path / "spool")
    good, bad = (store.start_trial(study, packed_plan(qv), "sampled") for qv in (1, 2))
    document = wire.encode(result_of(bad.id)).replace("9000", number)
    (tmp_path / "spool" / f"{bad.id}.json").write_text(document)
    spool.put(result_of(good.id))
    assert spool.replay(store) == 1
    assert (tmp_path / "spool" / f"{bad.id}.bad").read_text() == document
    assert [trial.id for trial in store.running_trials()] == [bad.id]


@on_both_databases
def test_a_column_takes_no_bad_number(store: Store) -> None:
    fingerprint = store.add_workload(WORKLOAD)
    launch = store.start_launch(packed_plan(), fingerprint, None)
    ended = LaunchResult(
        launch_id=launch.id, status="finished", steps=1 << 63, training_samples_per_second=1.0, finished=NOON
    )
    for refused in (
        lambda: store.start_launch(packed_plan(), fingerprint, nan),
        lambda: store.finish_launch(ended),
        lambda: store.finish_launch(replace(ended, steps=1, training_samples_per_second=inf)),
        lambda: store.add_workload(changed("model.unit_flops", inf)),
        lambda: store.add_workload(changed("hardware.ram_bytes", 1 << 63)),
        lambda: store.create_study(fingerprint, {}, seed=1 << 63),
    ):
        with pytest.raises(NotStorable, match="nothing was stored: "):
            refused()
    assert store.running_launches() == (launch,)
    assert store.problems() == ()


def spoil_outcome(engine: Engine, trial: str, old: str, new: str) -> None:
    with engine.begin() as connection:
        update = "UPDATE autotune_outcome SET document = replace(document, :old, :new) WHERE trial_id = :trial"
        assert connection.execute(text(update), {"old": old, "new": new, "trial": trial}).rowcount == 1


@pytest.mark.parametrize("spoil", [("2.5", "null"), ("2.5", "NaN"), ("9000", f"{10**30}")])
def test_a_bad_number_that_was_stored_hides_nothing_else_and_is_mended(
    store: Store, database_url: str, engine: Engine, spoil: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    study = study_of(store)
    bad, good = (store.start_trial(study, packed_plan(qv), "sampled") for qv in (8, 9))
    for trial in (bad, good):
        store.finish_trial(result_of(trial.id))
    concluded(store, best_of(study))
    spoil_outcome(engine, bad.id, *spoil)
    assert [trial.id for trial in store.trials(study)] == [good.id]
    assert [trial.id for trial in store.answers(WORKLOAD.fingerprint)] == [good.id]
    assert f"left out autotune_trial {bad.id}, which cannot be read" in caplog.text
    for command in (["studies"], ["studies", study], ["plans"], ["show", packed_plan().id]):
        answer = CliRunner().invoke(main, [*command, "--db", database_url])
        assert (answer.exit_code, packed_plan().id in answer.stdout) == (0, True), answer.output
    assert {(problem.table, problem.key) for problem in store.problems()} == {
        ("autotune_trial", bad.id),
        ("autotune_outcome", bad.id),
    }
    store.close()
    engine.dispose()
    repair(database_url)
    with open_store(database_url) as again:
        assert again.problems() == ()
        assert [type(trial).__name__ for trial in again.trials(study)] == ["AbandonedTrial", "FinishedTrial"]


def test_a_winner_that_cannot_be_read_hides_neither_its_study_nor_others(
    store: Store, database_url: str, engine: Engine
) -> None:
    bad, good = study_of(store), study_of(store)
    trial = store.start_trial(bad, packed_plan(), "sampled")
    store.finish_trial(result_of(trial.id))
    for study in (bad, good):
        concluded(store, best_of(study))
    with engine.begin() as connection:
        update = "UPDATE autotune_best_plan SET estimated_samples_per_second = 0 WHERE study_id = :study"
        connection.execute(text(update), {"study": bad})
    assert [best.study_id for best in store.best_plans()] == [good]
    for command in (["studies"], ["studies", bad], ["plans"]):
        answer = CliRunner().invoke(main, [*command, "--db", database_url])
        assert answer.exit_code == 0, answer.output
    assert f"autotune_best_plan {bad}: cannot be read" in "; ".join(map(str, store.problems()))


@pytest.mark.parametrize("new", ["-0.125", "1e999", "NaN"])
def test_a_stored_profile_is_checked_like_a_measured_one(
    store: Store, database_url: str, engine: Engine, new: str
) -> None:
    store.add_workload(WORKLOAD)
    keys = WORKLOAD.hardware.fingerprint, WORKLOAD.model.fingerprint, WORKLOAD.software
    store.save_layer_profile(*keys, wire.encode(COSTS).replace("0.125", new))
    (problem,) = store.problems()
    assert (problem.table, problem.what[:15]) == ("autotune_layer_profile", "cannot be read:")
    store.close()
    engine.dispose()
    assert repair(database_url).dropped == {"autotune_layer_profile": 1}
