"""What a check finds, and what a repair makes of it."""

from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from storage.errors import DatabaseUnavailable
from storage.records import AbandonedTrial, FinishedTrial
from storage.store import Store, open_store
from storage.upkeep.repair import repair
from tests.contracts.conftest import on_both_databases
from tests.values.parameters import parameters
from tests.values.storage import (
    OUTCOMES,
    WORKLOAD,
    best_of,
    changed,
    concluded,
    packed_plan,
    result_of,
    window_of,
)


def filled(store: Store) -> str:
    study = store.create_study(store.add_workload(WORKLOAD), {}, seed=7).id
    for name, outcome in OUTCOMES.items():
        store.finish_trial(result_of(store.start_trial(study, packed_plan(len(name)), name).id, outcome))
    store.abandon_trial(store.start_trial(study, packed_plan(40), "sampled").id)
    concluded(store, best_of(study))
    other = store.create_study(store.add_workload(changed("hardware.devices", 4)), {}, seed=0).id
    store.start_trial(other, packed_plan(), "default")
    store.take_resources(store.add_agent("a host", "1 1").id, ["GPU-a"])
    launch = store.start_launch(packed_plan(), WORKLOAD.fingerprint, 8.0)
    store.add_window(window_of(launch.id))
    return study


SPOILS = {
    "another device": ("UPDATE autotune_hardware SET devices = 16 WHERE devices = 8", "its content is that of"),
    "another model": ("UPDATE autotune_model SET vision_layers = 3", "its content is that of"),
    "other data": ("UPDATE autotune_data_profile SET samples = 999", "its content is that of"),
    "another batch": ("UPDATE autotune_workload SET global_batch_samples = 33", "its content is that of"),
    "a plan of nonsense": ("UPDATE autotune_plan SET document = '{'", "cannot be read"),
    "another capacity": ("UPDATE autotune_plan SET qv = 77 WHERE qv = 9", "qv contradict"),
    "no outcome": ("DELETE FROM autotune_outcome WHERE kind = 'rejected'", "finished without an outcome"),
    "an early outcome": (
        "UPDATE autotune_trial SET status = 'running', finished = NULL WHERE role = 'completed'",
        "running with an outcome",
    ),
    "an outcome of nonsense": ("UPDATE autotune_outcome SET document = 'x' WHERE kind = 'failed'", "cannot be read"),
    "another speed": ("UPDATE autotune_outcome SET peak_bytes = 1 WHERE kind = 'completed'", "peak_bytes contradict"),
    "a lost rank": ("DELETE FROM autotune_stage_measurement WHERE rank = 1", "1 ranks in place of 2"),
    "a lost trial": (
        "UPDATE autotune_trial SET number = 77 WHERE role = 'sampled'",
        "6 trials have the numbers 0 to 77",
    ),
    "a lost winner": ("DELETE FROM autotune_best_plan", "has ended without a winner"),
    "a winner too early": ("UPDATE autotune_study SET finished = NULL", "has a winner, but no end"),
    "a winner without time": ("UPDATE autotune_best_plan SET epoch_seconds = -1", "an epoch takes -1.0 s"),
    "ties of nonsense": ("UPDATE autotune_best_plan SET ties = '[1'", "cannot be read"),
    "a winner of another job": (
        "UPDATE autotune_best_plan SET workload_fingerprint = (SELECT workload_fingerprint FROM autotune_study WHERE "
        "finished IS NULL)",
        "its winner is of",
    ),
    "a window of nonsense": ("UPDATE autotune_launch_window SET parts = '{}'", "cannot be read"),
    "a window that runs backwards": ("UPDATE autotune_launch_window SET last_step = 1", "the steps 2 to 1"),
    "a lease of nobody": ("UPDATE autotune_agent SET ended = started", "held by an agent that has ended"),
}


ALIKE = {
    *("another device", "other data", "another batch", "another speed"),
    *("an outcome of nonsense", "ties of nonsense"),
}
"""Found as others of them are, in other tables."""


@on_both_databases
def test_what_the_store_writes_is_right(store: Store) -> None:
    filled(store)
    assert list(store.problems()) == []


@pytest.mark.parametrize("name", parameters({name: name for name in SPOILS}, short=SPOILS.keys() - ALIKE))
def test_what_is_wrong_is_found_and_mended_after_a_copy(
    store: Store, database_url: str, engine: Engine, name: str
) -> None:
    study = filled(store)
    spoil, message = SPOILS[name]
    with engine.begin() as connection:
        assert connection.execute(text(spoil)).rowcount >= 1
    assert any(message in str(problem) for problem in store.problems()), list(map(str, store.problems()))
    store.close()
    engine.dispose()
    done = repair(database_url)
    with open_store(database_url) as again:
        assert list(again.problems()) == []
        if name in ("a lost rank", "a lost trial", "a winner too early", "a lease of nobody", "an early outcome"):
            assert not any(done.dropped.values())
            assert len(again.trials(study)) == 6
            assert again.winner(study) == best_of(study)
    with engine.connect() as connection:
        if engine.dialect.name == "postgresql":
            place = done.kept_as.rpartition(" ")[2]
            assert connection.scalar(text(f"SELECT count(*) FROM {place}.autotune_trial")) == 7
    if engine.dialect.name == "sqlite":
        assert Path(done.kept_as).stat().st_size


@on_both_databases
def test_a_trial_whose_outcome_is_lost_is_given_up_and_the_study_goes_on(
    store: Store, database_url: str, engine: Engine
) -> None:
    study = filled(store)
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM autotune_outcome WHERE kind = 'rejected'"))
        connection.execute(text("DELETE FROM autotune_best_plan"))
    store.close()
    repair(database_url)
    with open_store(database_url) as again:
        trials = again.trials(study)
        assert [trial.number for trial in trials] == list(range(6))
        assert sum(isinstance(trial, AbandonedTrial) for trial in trials) == 2
        assert sum(isinstance(trial, FinishedTrial) for trial in trials) == 4
        assert again.study(study).finished is None


@on_both_databases
def test_nothing_is_repaired_where_nothing_is(database_url: str) -> None:
    with pytest.raises(DatabaseUnavailable, match=r"no database|no tables"):
        repair(database_url)
