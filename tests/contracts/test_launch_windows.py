"""The speed of a training by window of steps, on both databases."""

import pytest

from storage.errors import AlreadyFinished, UnknownRecord
from storage.records import LaunchResult
from storage.store import Store
from tests.contracts.conftest import on_both_databases
from tests.values.storage import NOON, WORKLOAD, packed_plan, slow_window, window_of


@on_both_databases
def test_the_speed_of_a_launch_is_stored_by_window_also_after_its_end_and_then_never_changes(store: Store) -> None:
    plan, workload = packed_plan(), store.add_workload(WORKLOAD)
    launch, other = (store.start_launch(plan, workload, 12.5) for _ in range(2))
    alone = window_of(other.id, promised_samples_per_second=None)
    windows = [slow_window(launch.id, 12), window_of(launch.id, 2), alone]
    store.add_window(windows[0])
    store.finish_launch(
        LaunchResult(launch_id=launch.id, status="finished", steps=21, training_samples_per_second=7.0, finished=NOON)
    )
    for window in windows:
        store.add_window(window)
    assert [found.windows for found in store.launches(plan.id)] == [(windows[1], windows[0]), (windows[2],)]
    assert [found.windows for found in store.running_launches()] == [(windows[2],)]
    with pytest.raises(AlreadyFinished, match="from step 12 on is stored with other figures"):
        store.add_window(window_of(launch.id, 12))
    with pytest.raises(UnknownRecord, match="no launch"):
        store.add_window(window_of(32 * "0"))
    assert not list(store.problems())


@pytest.mark.parametrize("fields", [{"first_step": 0}, {"last_step": 1}, {"step_seconds": 0.0}])
def test_a_window_that_there_cannot_be_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="cannot have"):
        window_of("a launch", **fields)  # type: ignore[arg-type]
