from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.values.data import WEIGHTS, build, index_of, lengths
from trials.data.epoch import Epoch, PackSizes
from trials.data.index import DatasetIndex
from trials.plan import Packed, Packing, Padded

PACKED = Packed(qv=20, qt=400, qv_min=16, qt_min=350)
packings = st.sampled_from([Padded(samples=1), Padded(samples=3), PACKED, Packed(qv=3, qt=100, qv_min=0, qt_min=0)])


def mixed(count: int) -> DatasetIndex:
    random = np.random.default_rng(0)
    return index_of(
        list(zip(random.integers(0, 6, count).tolist(), random.integers(5, 300, count).tolist(), strict=True))
    )


@given(lengths, packings, st.integers(1, 5), st.integers(1, 40), st.integers(0, 3))
def test_every_sample_is_trained_exactly_once(
    rows: list[tuple[int, int]], packing: Packing, ranks: int, batch: int, seed: int
) -> None:
    epoch = build(index_of(rows), packing, ranks=ranks, batch=batch, seed=seed)
    steps = [epoch.step(number) for number in range(epoch.steps)]
    shown = Counter(int(row) for step in steps for of_rank in step.packs for pack in of_rank for row in pack)
    assert shown == Counter(range(len(rows)))


@given(lengths, packings, st.integers(1, 5), st.integers(1, 40))
def test_all_ranks_of_a_step_have_equally_many_micro_batches(
    rows: list[tuple[int, int]], packing: Packing, ranks: int, batch: int
) -> None:
    epoch = build(index_of(rows), packing, ranks=ranks, batch=batch)
    shapes = [{len(of_rank) for of_rank in epoch.step(number).packs} for number in range(epoch.steps)]
    assert all(len(epoch.step(number).packs) == ranks for number in range(epoch.steps))
    assert shapes[:-1] == [{epoch.micro_batches}] * (epoch.steps - 1)
    assert 0 < max(shapes[-1]) <= epoch.micro_batches


@given(lengths, packings, st.integers(1, 4))
def test_the_totals_of_the_steps_are_the_totals_of_the_dataset(
    rows: list[tuple[int, int]], packing: Packing, ranks: int
) -> None:
    index = index_of(rows)
    steps = [step for epoch in [build(index, packing, ranks=ranks)] for step in map(epoch.step, range(epoch.steps))]
    totals = [(step.samples, step.vision_units, step.text_tokens, step.target_tokens) for step in steps]
    columns = (index.vision_units, index.text_tokens, index.target_tokens)
    assert tuple(map(sum, zip(*totals, strict=True))) == (len(rows), *(int(column.sum()) for column in columns))


@given(lengths, packings, st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_is_a_function_of_its_arguments(
    rows: list[tuple[int, int]], packing: Packing, seed: int, number: int
) -> None:
    one, other = (build(index_of(rows), packing, seed=seed, epoch=number) for _ in range(2))
    assert one.assignment.tolist() == other.assignment.tolist()
    assert one.packs.samples.tolist() == other.packs.samples.tolist()


@pytest.mark.parametrize("packing", [Padded(samples=2), PACKED])
def test_seeds_and_epochs_differ_in_their_order(packing: Packing) -> None:
    index = mixed(60)
    orders = [
        build(index, packing, seed=seed, epoch=number).packs.samples.tolist()
        for seed, number in ((0, 0), (0, 1), (1, 0))
    ]
    assert orders[0] != orders[1] != orders[2] != orders[0]


@pytest.mark.parametrize("packing", [Padded(samples=2), PACKED])
def test_steps_are_counted_before_packs_are_arranged(packing: Packing) -> None:
    epoch = build(mixed(60), packing, ranks=4, batch=8)
    counted = epoch.height, epoch.steps, epoch.batch_deviation
    assert "assignment" not in vars(epoch)
    assert epoch.assignment.shape == (epoch.height, 4)
    rows = [len(epoch.rows(number)) for number in range(epoch.steps)]
    assert (sum(rows), len(rows), epoch.batch_deviation) == counted


def test_the_costliest_packs_are_halved_until_every_rank_has_one() -> None:
    index = index_of([(1, 10)] * 4 + [(1, 90)] * 2)
    epoch = build(index, Packed(qv=2, qt=180, qv_min=2, qt_min=180), ranks=4)
    assert epoch.assignment.shape == (1, 4)
    assert sorted(epoch.packs.counts.tolist()) == [1, 1, 2, 2]
    assert sorted(epoch.packs.sums(epoch.index.text_tokens).tolist()) == [10, 20, 90, 100]


def test_padded_micro_batches_are_cut_again_in_the_last_row_alone() -> None:
    packs = build(index_of([(1, 10)] * 21), Padded(samples=3), ranks=4).packs
    assert packs.counts.tolist() == [3] * 4 + [2, 2, 2, 3]
    assert build(index_of([(1, 10)] * 24), Padded(samples=3), ranks=4).packs.counts.tolist() == [3] * 8


def test_empty_packs_are_added_where_no_pack_can_be_halved() -> None:
    epoch = build(index_of([(1, 10)]), Padded(samples=2), ranks=3)
    (step,) = (epoch.step(number) for number in range(epoch.steps))
    assert sorted(len(pack) for (pack,) in step.packs) == [0, 0, 1]
    assert step.target_tokens == 5


def idle_share(epoch: Epoch) -> float:
    """Return the share of time in which ranks wait for the slowest one of their step."""
    cost = epoch.pack_sizes().cost(WEIGHTS)
    load = np.stack([cost[epoch.rows(number)].sum(axis=0) for number in range(epoch.steps)])
    return float(1 - load.mean(axis=1).sum() / load.max(axis=1).sum())


def test_matched_packs_leave_ranks_hardly_waiting() -> None:
    index = mixed(4000)
    small = Packed(qv=8, qt=400, qv_min=0, qt_min=0)
    matched = build(index, small, ranks=4, batch=32)
    shuffled = build(index, Padded(samples=2), ranks=4, batch=32)
    # Where steps are matched one by one so that they are mixed; over 64 rows, 2 % would wait.
    assert idle_share(matched) < 0.035
    assert idle_share(shuffled) > 0.1


def test_no_rank_has_the_costlier_packs_all_along() -> None:
    one_each = Packed(qv=1, qt=80, qv_min=1, qt_min=80)
    epoch = build(index_of([(0, tokens) for tokens in range(41, 81)]), one_each, ranks=2, batch=8)
    load = epoch.pack_sizes().tokens[epoch.assignment].reshape(epoch.steps, epoch.micro_batches, 2).sum(axis=1)
    assert (epoch.micro_batches, len(load)) == (4, 5)
    assert abs(load[:, 0] - load[:, 1]).max() <= 1


def test_steps_do_not_drift_from_costly_to_cheap() -> None:
    epoch = build(mixed(4000), Packed(qv=8, qt=400, qv_min=0, qt_min=0), ranks=2, batch=32)
    load = epoch.pack_sizes().cost(WEIGHTS)[epoch.assignment].sum(axis=1)
    assert load[:100].mean() == pytest.approx(load.mean(), rel=0.1)


@pytest.mark.parametrize(
    ("batch", "micro_batches", "deviation"), [(8, 2, 0.0), (12, 3, 0.0), (9, 2, 1 / 9), (1, 1, 3.0)]
)
def test_micro_batches_come_as_near_to_the_global_batch_as_they_can(
    batch: int, micro_batches: int, deviation: float
) -> None:
    epoch = build(index_of([(1, 10)] * 40), Padded(samples=2), ranks=2, batch=batch)
    assert epoch.micro_batches == micro_batches
    assert epoch.batch_deviation == pytest.approx(deviation)
    assert epoch.step(0).samples == 4 * micro_batches


def columns(sizes: PackSizes) -> list[list[int]]:
    return [column.tolist() for column in (sizes.units, sizes.tokens, sizes.squares, sizes.samples)]


def test_sizes_of_padded_packs_count_the_padding() -> None:
    epoch = build(index_of([(0, 10), (0, 30)]), Padded(samples=2), ranks=1)
    assert columns(epoch.pack_sizes()) == [[1], [60], [1800], [2]]


def test_sizes_of_joined_packs_count_each_sample_for_itself() -> None:
    epoch = build(index_of([(2, 10), (3, 30)]), PACKED, ranks=1)
    assert columns(epoch.pack_sizes()) == [[5], [40], [1000], [2]]


def test_an_empty_pack_has_the_size_of_its_stand_ins() -> None:
    epoch = build(index_of([(2, 10)]), PACKED, ranks=2)
    assert columns(epoch.pack_sizes()) == [[2, 1], [10, 1], [100, 1], [1, 0]]


def test_a_step_behind_the_last_is_refused() -> None:
    epoch = build(index_of([(1, 10)]), PACKED, ranks=1)
    with pytest.raises(IndexError, match="step 1 of an epoch of 1 steps"):
        epoch.step(1)
