"""Packs of several levels: what each holds, and how their rows make up steps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.epoch_balance import balance, dist_ratios, mixing
from tests.values.data import WEIGHTS, build, index_of, lengths
from trials.arrays import Floats, Ints
from trials.certification import Mixed
from trials.data.epoch import Epoch
from trials.data.epoch_count import count_epoch
from trials.data.index import DatasetIndex
from trials.data.levels import check_levels
from trials.data.packs import build_packs
from trials.data.steps.arrangement import arrange
from trials.errors import DataError, InvalidPlan
from trials.plan import Levelled, Packed

SHORT = Packed(qv=4, qt=120, qv_min=0, qt_min=0)
LEVELS = Levelled(levels=(SHORT, replace(SHORT, qv=9, qt=300, sequence=2), replace(SHORT, qv=20, qt=900, sequence=4)))


def mixed(count: int) -> DatasetIndex:
    """Many short samples and few long ones."""
    random = np.random.default_rng(0)
    tokens = np.minimum(random.pareto(1.2, count) * 30 + 20, 900).astype(int)
    return index_of(list(zip(random.integers(0, 4, count).tolist(), tokens.tolist(), strict=True)))


@given(lengths, st.integers(0, 2**31 - 1))
def test_every_sample_is_packed_once_at_a_level_that_holds_it(rows: list[tuple[int, int]], seed: int) -> None:
    index = index_of(rows)
    packs = build_packs(index, np.arange(len(index)), LEVELS, seed, "own-pack")
    assert sorted(packs.samples) == list(range(len(index)))
    limits = np.array([(level.qv, level.qt) for level in LEVELS.levels])[packs.level_of_pack]
    within = (packs.sums(index.vision_units) <= limits[:, 0]) & (packs.sums(index.text_tokens) <= limits[:, 1])
    assert (within | (packs.counts == 1)).all()
    # A pack of a level holds a sample that is too long for the one before.
    for level, before in ((1, LEVELS.levels[0]), (2, LEVELS.levels[1])):
        for number in packs.of_level(level):
            rows_of_pack = packs.pack(number)
            too_long = (index.vision_units[rows_of_pack] > before.qv) | (index.text_tokens[rows_of_pack] > before.qt)
            assert too_long.any()


def test_long_packs_are_filled_up_with_the_longest_short_samples_that_fit() -> None:
    index = index_of([(1, 600), (1, 110), (1, 100), (1, 100), (1, 60), (1, 30), (9, 20)])
    packs = build_packs(index, np.arange(len(index)), LEVELS, 0, "own-pack")
    (longest,) = packs.of_level(2)
    # 600 + 20 tokens leave 280, and 10 units leave 10.
    held = [packs.pack(number).tolist() for number in packs.of_level(2)]
    assert sorted(index.text_tokens[packs.pack(longest)].tolist(), reverse=True)[:3] == [600, 110, 100]
    assert sum(index.text_tokens[row] for row in held[0]) > 870
    assert 6 in [int(row) for number in packs.of_level(1) for row in packs.pack(number)] + held[0]


@given(lengths, st.integers(1, 40), st.integers(0, 3))
def test_an_epoch_of_levels_shows_every_sample_once(rows: list[tuple[int, int]], batch: int, seed: int) -> None:
    epoch = build(index_of(rows), LEVELS, ranks=4, batch=batch, seed=seed)
    assert count_epoch(epoch).wrong == 0
    steps = [epoch.step(number) for number in range(epoch.steps)]
    assert sum(step.samples for step in steps) == len(rows)
    # Each row has one level, and each of its packs as many neighbouring ranks as share it.
    for row in epoch.assignment:
        (level,) = {*epoch.packs.level_of_pack[row].tolist()}
        degree = LEVELS.degrees[level]
        assert np.array_equal(row, np.repeat(row[::degree], degree))
        assert len({*row.tolist()}) == len(row) // degree


def test_every_step_has_the_levels_in_proportion() -> None:
    epoch = build(mixed(4000), LEVELS, ranks=4, batch=30)
    levels = epoch.packs.level_of_pack[epoch.assignment[:, 0]]
    whole = len(levels) // epoch.micro_batches * epoch.micro_batches
    for level in range(3):
        of_steps = (levels[:whole].reshape(-1, epoch.micro_batches) == level).sum(axis=1)
        assert of_steps.max() - of_steps.min() <= 1
        assert of_steps.sum() > 0
    samples = np.array([epoch.step(number).samples for number in range(epoch.steps - 1)])
    assert (abs(samples / samples.mean() - 1) < 0.25).all()


def test_with_whole_steps_nearly_every_step_has_one_level() -> None:
    mixture, whole = (
        build(mixed(4000), replace(LEVELS, whole_steps=each), ranks=4, batch=30) for each in (False, True)
    )
    assert whole.micro_batches == mixture.micro_batches > 1
    assert sorted(whole.assignment.ravel().tolist()) == sorted(mixture.assignment.ravel().tolist())
    levels = whole.packs.level_of_pack[whole.assignment[:, 0]]
    rows = np.array([len({*levels[start : start + whole.micro_batches]}) for start in whole_starts(whole)])
    # What each of three levels has beyond whole steps fills at most three more.
    assert (rows > 1).sum() <= 3
    assert len({*levels.tolist()}) == 3
    assert count_epoch(whole).wrong == 0


def whole_starts(epoch: Epoch) -> range:
    """First rows of the steps."""
    return range(0, len(epoch.assignment), epoch.micro_batches)


def test_ranks_hardly_wait_for_others_with_packs_of_other_levels() -> None:
    found = balance(build(mixed(4000), LEVELS, ranks=4, batch=30), WEIGHTS)
    assert found.samples == 4000
    assert found.cost_efficiency > 0.85
    assert found.step_cost_efficiency > 0.97
    assert found.samples_per_step.mean == pytest.approx(30, rel=0.1)


def test_ranks_that_share_packs_take_equal_parts_of_a_steps_work() -> None:
    random = np.random.default_rng(0)
    levels = np.repeat([0, 1], [160, 40])
    costs = random.random((200, 3)) * np.where(levels, 2.0, 1.0)[:, None]
    rows = arrange(
        costs, np.ones(200, dtype=np.int64), np.zeros((200, 0)), levels, (1, 2), data_parallel=4, micro_batches=10,
        mixed=Mixed(samples=36, tolerance=0.9, variance=2.0), random=random,
    )  # fmt: skip
    assert sorted({*rows.ravel().tolist()}) == list(range(200))
    of_shared = rows[levels[rows[:, 0]] == 1]
    assert np.array_equal(of_shared, np.repeat(of_shared[:, ::2], 2, axis=1))
    load = costs.sum(axis=1)[rows].reshape(-1, 10, 4).sum(axis=1)
    assert (load.max(axis=1) - load.min(axis=1)).mean() < 0.1 * load.mean()


def rows_of_levels() -> tuple[Floats, Ints]:
    """Costs of nearly full packs of two levels that differ in attention, and their rows."""
    random = np.random.default_rng(0)
    tokens, attention = 100 - 2 * random.random(4096), random.lognormal(0, 1, 4096)
    costs = np.stack([np.zeros(4096), tokens, attention], axis=1)
    rows = arrange(
        costs, np.ones(4096, dtype=np.int64), np.zeros((4096, 0)), np.repeat([0, 1], 2048), (1, 1), data_parallel=4,
        micro_batches=8, mixed=Mixed(samples=32, tolerance=0.1, variance=2.0), random=random,
    )  # fmt: skip
    return costs, rows


def test_packs_of_levels_in_a_row_are_alike_in_tokens_and_in_attention() -> None:
    """Where tokens decide the time, rows of like tokens alone would differ in attention like any packs."""
    costs, rows = rows_of_levels()
    _, tokens, attention = (dist_ratios(part[rows]).mean() for part in (costs + 1e-9).T)
    assert tokens < 0.004
    assert attention < 0.01
    anywhere = np.random.default_rng(1).permutation(4096).reshape(-1, 4)
    assert dist_ratios(costs[anywhere, 2]).mean() > 0.4
    # Ranks wait hardly longer than with rows by cost.
    takes = costs.sum(axis=1)[rows].max(axis=1).sum()
    assert takes < 1.005 * np.sort(costs.sum(axis=1)).reshape(-1, 4).max(axis=1).sum()


def test_steps_of_levels_hold_other_samples_in_every_epoch() -> None:
    index = mixed(10_000)
    levels = tuple(replace(level, packer="isf", qt_min=level.qt - 5) for level in LEVELS.levels)
    first, second = (build(index, Levelled(levels=levels), ranks=4, batch=30, epoch=epoch) for epoch in (0, 1))
    assert mixing(first, second) > 0.99


def test_a_level_without_a_sample_is_refused_with_what_the_data_have() -> None:
    check_levels(mixed(2000), LEVELS, skips=False)
    short = index_of([(1, 30), (2, 90), (1, 250)])
    with pytest.raises(InvalidPlan, match=r"level 3 with qv=20 qt=900 holds no sample: the longest .* 2 vision units "):
        check_levels(short, LEVELS, skips=False)
    with pytest.raises(
        InvalidPlan, match=r"level 1 .* holds no sample: the shortest samples have 1 vision units and 200"
    ):
        check_levels(index_of([(1, 200), (1, 800)]), LEVELS, skips=False)


def test_a_sample_above_the_last_level_is_refused_unless_it_is_skipped() -> None:
    index = index_of([(1, 30), (1, 250), (1, 800), (1, 950), (22, 900)])
    message = "2 samples are above the last level with qv=20 qt=900, .*1 vision units and 950 .* qv=22 qt=950, or set"
    with pytest.raises(InvalidPlan, match=message):
        check_levels(index, LEVELS, skips=False)
    check_levels(index, LEVELS, skips=True)
    with pytest.raises(DataError, match="above the pack's qv=20 qt=900, as in 2 samples"):
        build_packs(index, np.arange(5), LEVELS, 0, "fail")
