"""Steps of any packer next to steps in random order: their samples, and the variance of what these hold."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autotune.epoch_balance import balance
from tests.values.data import WEIGHTS, index_of
from tests.values.parameters import parameters
from trials.arrays import Ints
from trials.certification import Mixed, Neutrality
from trials.data.epoch import Epoch, EpochSettings, build_epoch
from trials.data.index import DatasetIndex
from trials.data.neutral import neutrality
from trials.data.steps.traits import Traits
from trials.plan import Packed, Padded

COUNT = 20_000
MIXED = Mixed(samples=100, tolerance=0.1, variance=2.0)


def data(kind: str) -> DatasetIndex:
    random = np.random.default_rng(0)
    text = np.clip(random.lognormal(5, 1.1, COUNT), 8, 7000).astype(int)
    match kind:
        case "zero-inflated images":
            units = np.where(random.random(COUNT) < 0.6, random.integers(1, 13, COUNT), 0)
        case "log-normal text":
            units = np.zeros(COUNT, dtype=int)
        case "long-tailed":
            units = np.minimum(random.geometric(0.4, COUNT) - 1, 12)
            text = np.minimum(random.pareto(1.2, COUNT) * 60 + 30, 4000).astype(int)
        case "tiles":
            units = random.choice([1, 3, 4, 5, 7, 13], COUNT)
            text = random.integers(20, 600, COUNT)
        case _:
            # Sources of other kinds of samples, in order of their files.
            units, text = np.repeat([0, 1, 6], [8000, 8000, 4000]), np.where(np.arange(COUNT) < 8000, text, 60)
    tokens: Ints = text + 100 * units
    index = index_of(list(zip(units.tolist(), tokens.tolist(), strict=True)), (1.0,) * 3)
    return replace(index, file=np.repeat([0, 1, 2], [8000, 8000, 4000]).astype(np.int32))


def epoch_of(index: DatasetIndex, packer: str, ranks: int, number: int = 0) -> Epoch:
    packing = Packed(qv=24, qt=8192, qv_min=24, qt_min=8064, packer=packer)
    settings = EpochSettings(global_batch_samples=ranks * 4, weights=WEIGHTS)
    samples = balance(build_epoch(index, packing, settings, data_parallel=1), WEIGHTS).samples_per_pack.mean
    settings = replace(settings, global_batch_samples=round(ranks * 4 * samples))
    return build_epoch(index, packing, settings, data_parallel=ranks, number=number)


PACKERS = "best-fit", "isf", "cutting-stock"
KINDS = "zero-inflated images", "log-normal text", "long-tailed", "tiles", "sources"


@pytest.mark.parametrize(
    ("kind", "packer"),
    parameters(
        {f"{kind}, {packer}": (kind, packer) for kind in KINDS for packer in PACKERS},
        short=("zero-inflated images, best-fit", "long-tailed, isf", "sources, cutting-stock"),
    ),
)
def test_steps_of_packs_vary_no_more_than_random_ones(kind: str, packer: str) -> None:
    index = data(kind)
    for ranks in (8, 32):
        epoch = epoch_of(index, packer, ranks)
        found = neutrality(epoch)
        assert found.faults(epoch.settings.mixed) == ()
        assert found.steps_near == 1
        assert max(found.variances.values()) <= 2


def test_pairs_of_samples_hardly_share_a_pack_again() -> None:
    index = data("log-normal text")
    packs = [np.empty(COUNT, dtype=np.int64) for _ in range(2)]
    for number, pack_of_row in enumerate(packs):
        packed = epoch_of(index, "best-fit", 8, number).packs
        pack_of_row[packed.samples] = np.repeat(np.arange(len(packed)), packed.counts)
    together = [np.unique(each, return_counts=True)[1] for each in (packs[0], packs[0] * COUNT + packs[1])]
    first, both = (float((counts * (counts - 1)).sum()) for counts in together)
    assert both / first < 0.01


def test_files_of_one_name_in_different_folders_are_different_sources() -> None:
    index = index_of([(0, 10)] * 12, repeats=(1.0, 1.0, 1.0))
    named = replace(
        index, files=tuple(replace(each, path=Path(f"/{place}/a.jsonl")) for place, each in enumerate(index.files))
    )
    every = np.arange(12)
    traits = Traits.of(named, every)
    assert traits.names == ("source a.jsonl", "source a.jsonl (2)", "source a.jsonl (3)")
    assert np.array_equal(traits.values, Traits.of(index, every).values)


def test_random_order_varies_as_random_order() -> None:
    index = data("tiles")
    settings = EpochSettings(global_batch_samples=32, weights=WEIGHTS)
    found = neutrality(build_epoch(index, Padded(samples=4), settings, data_parallel=8))
    assert found.steps == COUNT // 32
    assert found.steps_near == 1
    assert all(ratio == pytest.approx(1, abs=0.25) for ratio in found.variances.values())


@pytest.mark.parametrize(("ranks", "size"), [(2, 8), (2, 4), (8, 4), (1, 32)], ids=str)
def test_the_last_step_of_an_epoch_has_the_samples_that_are_left_over_and_is_no_fault(ranks: int, size: int) -> None:
    """955 samples are 29 steps of 32 and one of 27, as in any trainer that drops none."""
    index = index_of([(0, 10), (1, 90)] * 477 + [(0, 10)])
    settings = EpochSettings(global_batch_samples=32, weights=WEIGHTS)
    epoch = build_epoch(index, Padded(samples=size), settings, data_parallel=ranks)
    assert [epoch.step(number).samples for number in range(epoch.steps)] == [32] * 29 + [27]
    assert neutrality(epoch).faults(settings.mixed) == ()
    assert balance(epoch, WEIGHTS).steps_near == 1


def test_only_the_last_step_may_be_short() -> None:
    held = np.full(30, 32.0)
    mixed = Mixed(samples=32, tolerance=0.1, variance=2.0)
    for place, samples, to_end, near in (
        (-1, 5, True, 1),
        (-1, 5, False, 29 / 30),
        (-1, 40, True, 29 / 30),
        (7, 28, True, 29 / 30),
    ):
        steps = held.copy()
        steps[place] = samples
        assert mixed.share_near(steps, to_end=to_end) == near
    (fault,) = Neutrality(steps=30, steps_near=29 / 30, variances={}).faults(mixed)
    assert fault.startswith("3% of the steps miss")


def test_steps_of_like_samples_are_a_fault() -> None:
    (fault,) = Neutrality(steps=100, steps_near=1.0, variances={"length": 1.9, "images": 3.0}).faults(MIXED)
    assert fault == "the variance of images between steps is 3.00 times that of random order (2.00 is allowed)"
    (fault,) = Neutrality(steps=100, steps_near=0.95, variances={}).faults(MIXED)
    assert fault == "5% of the steps miss training.global_batch_samples: 100 by more than 10 samples"


def test_few_steps_may_vary_as_much_as_random_order_does_by_chance() -> None:
    assert Neutrality(steps=4, steps_near=1.0, variances={"length": 4.0}).faults(MIXED) == ()
    assert Neutrality(steps=1, steps_near=0.0, variances={"length": 0.0}).faults(MIXED) == ()
