from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.epoch_balance import SampleSpread, balance, dist_ratios, mixing, oversize, step_sums
from tests.values.data import index_of, lengths
from tests.values.parameters import examples
from trials.data.epoch import CostWeights, Epoch, EpochSettings, build_epoch
from trials.data.packs import Packs
from trials.plan import Packed, Packing, Padded

WEIGHTS = CostWeights(unit=10.0, token=1.0, square=0.0)
ROWS = [(2, 10), (0, 20), (4, 30), (1, 40), (3, 10)]
PACKING = Packed(qv=4, qt=40, qv_min=3, qt_min=40)


def epoch_of(
    *rows: Sequence[Sequence[int]],
    lengths: Sequence[tuple[int, int]] = ROWS,
    micro_batches: int = 1,
    batch: int = 2,
    packing: Packing = PACKING,
) -> Epoch:
    """An epoch whose rows hold these samples on each data rank."""
    packs = [pack for row in rows for pack in row]
    return Epoch(
        index=index_of(lengths),
        packing=packing,
        packs=Packs(
            samples=np.array([sample for pack in packs for sample in pack], dtype=np.int64),
            starts=np.cumsum([0, *(len(pack) for pack in packs)]),
            padded=isinstance(packing, Padded),
        ),
        data_parallel=len(rows[0]),
        micro_batches=micro_batches,
        settings=EpochSettings(global_batch_samples=batch, weights=WEIGHTS),
        arranged=lambda: np.arange(len(packs)).reshape(len(rows), -1),
    )


def built(rows: Sequence[tuple[int, int]], packing: Packing, ranks: int, epoch: int = 0) -> Epoch:
    return build_epoch(
        index_of(rows),
        packing,
        EpochSettings(global_batch_samples=6, weights=WEIGHTS),
        data_parallel=ranks,
        number=epoch,
    )


# --- ratios ---


def test_ratios_are_those_of_the_papers() -> None:
    found = balance(epoch_of([[0, 1], [2]], [[3], [4]]), WEIGHTS)
    assert found.dist_ratio_vision == pytest.approx((1 / 4 + 1 / 3) / 2)  # units (2, 4) and (1, 3)
    assert found.dist_ratio_language == pytest.approx((0 + 15 / 40) / 2)  # tokens (30, 30) and (40, 10)
    assert found.dist_ratio_targets == pytest.approx((0 + 15 / 40) / 2)  # half of the tokens
    assert found.attention_balance_ratio == pytest.approx((200 / 900 + 750 / 1600) / 2)  # (500, 900), (1600, 100)
    assert found.pad_ratio == 0.0


def test_padding_is_given_as_a_share_of_the_tokens_that_are_computed() -> None:
    found = balance(epoch_of([[0, 1], [2, 4]], [[3], []], packing=Padded(samples=2)), WEIGHTS)
    assert found.pad_ratio == pytest.approx(1 - 110 / (2 * 20 + 2 * 30 + 40))
    assert (found.relaxation_missed, found.vision_fill, found.text_fill) == (None, None, None)


@given(st.lists(st.lists(st.integers(1, 50), min_size=3, max_size=3), min_size=1, max_size=8))
def test_the_dist_ratio_is_the_papers_sum_over_ranks(rows: list[list[int]]) -> None:
    papers = [sum(max(row) - load for load in row) / (max(row) * len(row)) for row in rows]
    assert dist_ratios(np.array(rows)) == pytest.approx(papers)


def test_ranks_without_any_load_do_not_wait() -> None:
    assert dist_ratios(np.array([[0, 0], [0, 4]])).tolist() == [0, 0.5]


def test_a_pack_costs_its_targets_in_addition() -> None:
    weights = CostWeights(unit=10.0, token=1.0, square=0.0, target=4.0)
    # Targets are half of the 30, 30, 40 and 10 tokens.
    assert balance(epoch_of([[0, 1], [2]], [[3], [4]]), weights).cost == (70 + 4 * 15) + (50 + 4 * 20)
    padded = epoch_of([[0, 1], [2, 4]], [[3], []], packing=Padded(samples=2)).pack_sizes()
    assert padded.targets.tolist() == [15, 20, 20, 0]


def test_efficiency_is_the_ideal_cost_over_that_of_the_slowest() -> None:
    found = balance(epoch_of([[0, 1], [2]], [[3], [4]], micro_batches=2), WEIGHTS)
    # Packs cost 50, 70, 50 and 40.
    assert found.cost == 70 + 50
    assert found.cost_per_sample == 2 * 120 / 5
    assert found.cost_efficiency == pytest.approx(105 / 120)
    assert found.step_cost_efficiency == pytest.approx(105 / 110)


def test_without_room_for_units_packs_are_full_by_their_tokens_alone() -> None:
    texts, asked = [(0, 5 + 7 * number % 23) for number in range(60)], Packed(qv=1, qt=40, qv_min=1, qt_min=36)
    room, none = (built(texts, each, 2) for each in (asked, replace(asked, qv=0, qv_min=0)))
    assert none.packs.samples.tolist() == room.packs.samples.tolist()
    assert none.packs.starts.tolist() == room.packs.starts.tolist()
    missed = balance(room, WEIGHTS).relaxation_missed
    assert balance(none, WEIGHTS).relaxation_missed == missed
    assert missed


def test_samples_of_packs_that_ranks_share_are_whole_numbers() -> None:
    shared = replace(PACKING, qt=400, sequence=3)
    epoch = epoch_of([[0, 1, 2]], [[3, 4, 5, 6]], lengths=[(0, 9)] * 7, micro_batches=2, packing=shared)
    epoch = replace(epoch, data_parallel=3, arranged=lambda: np.array([[0, 0, 0], [1, 1, 1]]))
    spread = balance(epoch, WEIGHTS).samples_per_step
    assert (spread.mean, spread.least, spread.most) == (7, 7, 7)


def test_one_rank_never_waits() -> None:
    found = balance(built(ROWS, PACKING, 1), WEIGHTS)
    assert found.cost_efficiency == found.step_cost_efficiency == 1
    assert (found.dist_ratio_vision, found.dist_ratio_language, found.attention_balance_ratio) == (0, 0, 0)


@settings(max_examples=examples(40))
@given(lengths, st.integers(1, 5), st.sampled_from([PACKING, Padded(samples=2)]))
def test_ratios_and_shares_stay_within_0_and_1(rows: list[tuple[int, int]], ranks: int, packing: Packing) -> None:
    epoch = built(rows, packing, ranks)
    found = balance(epoch, WEIGHTS)
    shares = (
        found.pad_ratio,
        found.dist_ratio_vision,
        found.dist_ratio_language,
        found.dist_ratio_targets,
        found.attention_balance_ratio,
        found.cost_efficiency,
        found.step_cost_efficiency,
        found.steps_near,
        *(share for share in (found.relaxation_missed, found.vision_fill, found.text_fill) if share is not None),
    )
    assert all(-1e-12 <= share <= 1 + 1e-12 for share in shares)
    assert found.cost_efficiency <= found.step_cost_efficiency + 1e-12
    assert found.samples == len(rows)
    assert found.samples_per_pack.mean == pytest.approx(found.samples / found.packs)


# --- packs and steps ---


def test_packs_below_both_relaxed_capacities_are_reported() -> None:
    found = balance(epoch_of([[0, 1], [2]], [[3], [4]]), WEIGHTS)
    assert found.relaxation_missed == 1 / 4  # the first alone: 2 units, 30 tokens
    assert found.samples_per_pack == SampleSpread(mean=5 / 4, least=1, most=2)
    assert found.vision_fill == pytest.approx((2 + 4 + 1 + 3) / 4 / 4)
    assert found.text_fill == pytest.approx((30 + 30 + 40 + 10) / 4 / 40)


def test_a_stand_in_tile_fills_no_pack() -> None:
    found = balance(epoch_of([[1]], packing=Packed(qv=1, qt=40, qv_min=1, qt_min=40)), WEIGHTS)
    assert (found.vision_fill, found.relaxation_missed) == (0, 1)


def test_oversize_samples_are_counted_and_do_not_count_as_fill() -> None:
    packing = Packed(qv=3, qt=30, qv_min=3, qt_min=30)
    epoch = epoch_of([[0, 1], [2]], [[3], [4]], packing=packing)
    found = balance(epoch, WEIGHTS)
    assert oversize(epoch).tolist() == [False, False, True, True, False]
    assert (found.oversize, found.skipped) == (2, 0)
    assert found.vision_fill == pytest.approx((2 + 3) / 2 / 3)


def test_skipped_samples_are_reported() -> None:
    packing = Packed(qv=3, qt=30, qv_min=3, qt_min=30)
    epoch = build_epoch(
        index_of(ROWS),
        packing,
        EpochSettings(global_batch_samples=2, weights=WEIGHTS, oversize="skip"),
        data_parallel=1,
    )
    found = balance(epoch, WEIGHTS)
    assert (found.samples, found.oversize, found.skipped) == (3, 2, 2)


def test_fill_is_unknown_where_every_sample_is_oversize_or_no_image_is_allowed() -> None:
    above = balance(epoch_of([[2], [3]], packing=Packed(qv=0, qt=5, qv_min=0, qt_min=5)), WEIGHTS)
    assert (above.vision_fill, above.text_fill) == (None, None)
    text = balance(epoch_of([[1]], packing=Packed(qv=0, qt=40, qv_min=0, qt_min=40)), WEIGHTS)
    assert (text.vision_fill, text.text_fill) == (None, 0.5)


def test_samples_of_a_step_are_those_of_full_steps() -> None:
    rows = [[0, 1], [2]], [[3], [4]], [[0], [1]], [[2], [4]], [[3], []]
    found = balance(epoch_of(*rows, micro_batches=2, batch=7), WEIGHTS)
    assert found.samples_per_step == SampleSpread(mean=4.5, least=4, most=5)
    assert found.steps == 3
    assert found.steps_near == 1 / 2  # 5 is within two samples of 7, 4 is not
    unfilled = balance(epoch_of(rows[0], micro_batches=2, batch=5), WEIGHTS)
    assert unfilled.samples_per_step == SampleSpread(mean=3, least=3, most=3)


def test_loads_are_summed_over_the_rows_of_a_step() -> None:
    epoch = epoch_of([[0], [1]], [[2], [3]], [[4], []], micro_batches=2)
    assert step_sums(epoch, epoch.pack_sizes().tokens[epoch.assignment]).tolist() == [[40, 60], [10, 1]]


# --- mixing ---


def steps_of(*steps: Sequence[int]) -> Epoch:
    return epoch_of(*([step] for step in steps), lengths=[(1, 10)] * 12)


def test_the_same_steps_are_not_mixed() -> None:
    epoch = steps_of([0, 1, 2], [3, 4, 5], [6, 7, 8])
    assert mixing(epoch, steps_of([8, 6, 7], [2, 1, 0], [5, 3, 4])) == pytest.approx(0)


def test_a_fresh_shuffle_is_mixed() -> None:
    rows = [(1, 10)] * 3000
    packing = Packed(qv=2, qt=20, qv_min=2, qt_min=20)
    assert mixing(built(rows, packing, 2, 0), built(rows, packing, 2, 1)) == pytest.approx(1, abs=0.01)


def test_nothing_can_be_mixed_in_one_step_or_in_steps_of_one_sample() -> None:
    assert mixing(steps_of([0, 1, 2]), steps_of([2, 1, 0])) == 1
    assert mixing(steps_of([0], [1]), steps_of([1], [0])) == 1


@settings(max_examples=examples(40))
@given(st.permutations(range(8)), st.permutations(range(8)), st.integers(1, 5), st.integers(1, 5))
def test_mixing_counts_every_pair_of_samples(first: list[int], second: list[int], size: int, other: int) -> None:
    one, two = ([order[i : i + n] for i in range(0, 8, n)] for order, n in ((first, size), (second, other)))
    pairs, others = ({frozenset(pair) for step in steps for pair in combinations(step, 2)} for steps in (one, two))
    expected = len(others) / 28
    wanted = 1 - (len(pairs & others) / len(pairs) - expected) / (1 - expected) if pairs and expected < 1 else 1
    assert mixing(steps_of(*one), steps_of(*two)) == pytest.approx(wanted)


def test_each_showing_of_a_repeated_sample_counts() -> None:
    epoch = steps_of([0, 0], [1, 1])
    assert mixing(epoch, epoch) == 0


def test_ranks_of_a_row_have_packs_of_like_targets() -> None:
    targets = np.random.default_rng(0).integers(1, 100, 400).astype(np.int32)
    index = replace(index_of([(1, 100)] * 400), target_tokens=targets)
    packing = Packed(qv=1, qt=100, qv_min=1, qt_min=100)
    found = []
    for target in (0.0, 5.0):
        weights = CostWeights(unit=10.0, token=1.0, square=0.0, target=target)
        # Rows of like targets are steps of like targets, which only this tolerance allows.
        settings = EpochSettings(global_batch_samples=8, weights=weights, step_variance=100.0)
        epoch = build_epoch(index, packing, settings, data_parallel=4)
        found.append(balance(epoch, weights).dist_ratio_targets)
    assert found[0] > 0.2
    assert found[1] < 0.05
