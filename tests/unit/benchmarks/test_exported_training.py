"""The arithmetic of a comparison of another trainer with `autotune launch`."""

from typing import Any

import pytest

from benchmarks.exported.training import row_of, training_checks
from benchmarks.full_training.turns import Timed

BEST = {"plan": {"kind": "best"}, "epoch_seconds": 10.0}
EXPORTED = {"plan": {"kind": "padded"}, "price": {"epoch_seconds": 15.0}}


def timed(*losses: float, seconds: float, **more: Any) -> Timed:
    lines = [{"loss": loss, **more} for loss in losses]
    return Timed(seconds=(seconds,) * (len(losses) - 1), lines=tuple(lines))


def test_losses_and_speeds_are_of_the_same_steps() -> None:
    launch, best = (timed(4.0, 2.0, 1.0, seconds=each, samples=8) for each in (1.0, 0.5))
    there = timed(4.0, 2.004, 1.0, seconds=2.0)
    whole = Timed(seconds=(*there.seconds, 9.0), lines=(*there.lines, {"train_loss": 3.0}))
    row = row_of(BEST, EXPORTED, {"ms-swift": whole, "launch": launch, "launch of the best plan": best})
    assert row["largest_difference"] == pytest.approx(0.002)
    assert not training_checks(row)[0].holds
    assert row["samples_per_second"] == {"launch": 8.0, "ms-swift": 4.0, "launch of the best plan": 16.0}
    assert (row["price"], row["measured_price"], row["launch_over_ms_swift"]) == (1.5, 2.0, 2.0)


def test_a_training_that_ends_early_is_no_comparison() -> None:
    launch = timed(4.0, 2.0, seconds=1.0, samples=8)
    early = {"ms-swift": timed(4.0, seconds=1.0), "launch": launch, "launch of the best plan": launch}
    with pytest.raises(ValueError, match="argument"):
        row_of(BEST, EXPORTED, early)
