"""The explanation names a planted cause first, on a machine that shares no formula with it."""

import pytest

from benchmarks.planted.jobs import PLANTED, Planted
from benchmarks.planted_causes import explained, true_loss
from storage.explanation import BEST
from tests.values.parameters import parameters

CAUSES = ("padding", "data_imbalance", "stage_imbalance", "bubble", "recompute", "communication", "loading")


def test_every_cause_is_planted_once() -> None:
    assert tuple(planted.cause for planted in PLANTED) == CAUSES


@pytest.mark.parametrize(
    "planted",
    parameters({planted.cause: planted for planted in PLANTED}, short=("stage_imbalance",)),
)
def test_a_planted_cause_is_named_first(planted: Planted) -> None:
    found = explained(planted)
    time, why = found.time, found.explanation
    assert time.role == "default"
    first, second, *_ = time.causes
    assert first.name == planted.cause
    assert first.seconds - second.seconds > 2 * (first.error + second.error)
    for plan in why.plans:
        assert sum(part.seconds for part in plan.parts) == pytest.approx(plan.epoch_seconds)
    assert abs(time.part("unexplained").seconds) < 0.05 * time.epoch_seconds
    # Padding alone: without it there is less to recompute, too, and less to wait for.
    share, truth = first.seconds / time.epoch_seconds, true_loss(planted, found.usual)
    assert 0.4 * truth < share < 1.2 * truth
    assert why.winner.role == BEST
    assert why.winner.plan_id == found.winner.id
