"""The samples of an epoch are counted in its steps, and compared with the data."""

from dataclasses import replace

import numpy as np
import pytest

from tests.values.data import index_of
from trials.data.epoch import CostWeights, Epoch, EpochSettings, build_epoch
from trials.data.epoch_count import count_epoch
from trials.data.packs import Oversize
from trials.plan import Packed

ROWS = [(1, 50), (2, 80), (0, 30), (9, 90), (1, 60), (0, 20), (1, 70), (2, 40)] * 4


def epoch(oversize: Oversize = "own-pack", repeats: tuple[float, ...] = (1.0,)) -> Epoch:
    return build_epoch(
        index_of(ROWS, repeats),
        Packed(qv=4, qt=200, qv_min=4, qt_min=150),
        EpochSettings(
            global_batch_samples=8, weights=CostWeights(unit=100.0, token=1.0, square=0.01), oversize=oversize
        ),
        data_parallel=2,
    )


@pytest.mark.parametrize(
    ("oversize", "repeats", "samples", "above", "skipped"),
    [("own-pack", (1.0,), 32, 4, 0), ("skip", (1.0,), 28, 0, 4), ("own-pack", (1.5, 0.5), 32, None, 0)],
)
def test_a_whole_epoch_has_no_wrong_sample(
    oversize: Oversize, repeats: tuple[float, ...], samples: int, above: int | None, skipped: int
) -> None:
    built = epoch(oversize, repeats)
    count = count_epoch(built)
    assert (count.samples, count.wrong, count.skipped) == (samples, 0, skipped)
    assert above is None or count.oversize == above
    assert count.steps == built.steps
    sizes = [built.step(number).samples for number in range(built.steps)]
    assert count.last_samples == sizes[-1]
    full = [size for number, size in enumerate(sizes) if len(built.rows(number)) == built.micro_batches]
    assert (count.fewest_samples, count.most_samples) == (min(full), max(full))


def test_a_sample_in_the_place_of_another_and_a_lost_one_show() -> None:
    built = epoch()
    twice = np.array(built.packs.samples)
    twice[0] = twice[1]
    assert count_epoch(replace(built, packs=replace(built.packs, samples=twice))).wrong == 2
    starts = np.array(built.packs.starts)
    starts[-1] -= 1
    lost = count_epoch(replace(built, packs=replace(built.packs, starts=starts)))
    assert (lost.samples, lost.wrong) == (31, 1)
    assert lost.arrangement != count_epoch(built).arrangement
