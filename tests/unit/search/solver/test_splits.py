from collections.abc import Sequence
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.search.solver.splits import Choices, WantedSplits, best_splits, min_max_split, rows_within
from tests.values.parameters import examples

COUNT = 12


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[Choices], int]:
    """Few layers with small integer times, so that there are ties; some cuts have no choice, some several."""
    layers = draw(st.integers(1, 6))
    stages = []
    for _ in range(draw(st.integers(1, min(layers, 3)))):
        cuts = [(start, end) for start in range(layers) for end in range(start + 1, layers + 1)]
        rows = [
            (*cut, float(seconds))
            for cut in cuts
            for seconds in draw(st.lists(st.integers(1, 9), max_size=2, unique=True))
        ]
        table = np.array(rows).reshape(-1, 3)
        starts, ends = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
        stages.append(Choices(starts=starts, ends=ends, seconds=table[:, 2]))
    return stages, layers


def every_split(stages: Sequence[Choices], layers: int) -> list[tuple[int, ...]]:
    found = []
    for rows in product(*(range(len(choices.starts)) for choices in stages)):
        starts = [int(choices.starts[row]) for choices, row in zip(stages, rows, strict=True)]
        ends = [int(choices.ends[row]) for choices, row in zip(stages, rows, strict=True)]
        if [*starts, layers] == [0, *ends]:
            found.append(rows)
    return found


def times_of(stages: Sequence[Choices], rows: Sequence[int]) -> list[float]:
    return [float(choices.seconds[row]) for choices, row in zip(stages, rows, strict=True)]


@given(chains(), st.integers(1, 20), st.integers(1, COUNT), st.sampled_from([1.0, 1.25, 2.0, np.inf]))
@settings(max_examples=examples(150))
def test_the_best_splits_are_those_of_all_splits_with_the_least_time(
    chain: tuple[list[Choices], int], micro_batches: int, count: int, within: float
) -> None:
    stages, layers = chain
    found = best_splits(stages, layers, micro_batches, WantedSplits(count=count, within=within))
    of_all = sorted(
        sum(times) + (micro_batches - 1) * max(times)
        for times in (times_of(stages, rows) for rows in every_split(stages, layers))
    )
    near = [seconds for seconds in of_all if seconds <= within * of_all[0]]
    assert [split.seconds(micro_batches) for split in found] == near[:count]
    assert len({split.rows for split in found}) == len(found)
    assert {split.rows for split in found} <= set(every_split(stages, layers))
    for split in found:
        assert (split.total, split.slowest) == (sum(t := times_of(stages, split.rows)), max(t))


@given(chains())
@settings(max_examples=examples(60))
def test_the_slowest_stage_is_as_fast_as_in_any_split_and_then_the_total_is_least(
    chain: tuple[list[Choices], int],
) -> None:
    stages, layers = chain
    found = min_max_split(stages, layers)
    times = [times_of(stages, rows) for rows in every_split(stages, layers)]
    if found is None:
        assert not times
    else:
        assert (found.slowest, found.total) == min((max(of_split), sum(of_split)) for of_split in times)


@given(chains(), st.integers(1, 9))
@settings(max_examples=examples(60))
def test_rows_within_a_bound_are_those_of_the_splits_that_keep_it(chain: tuple[list[Choices], int], bound: int) -> None:
    stages, layers = chain
    within = [rows for rows in every_split(stages, layers) if max(times_of(stages, rows)) <= bound]
    found = rows_within(stages, layers, bound)
    assert [set(rows.tolist()) for rows in found] == [
        {rows[number] for rows in within} for number in range(len(stages))
    ]


@pytest.mark.parametrize("micro_batches", [2, 64])
def test_a_long_chain_is_split_into_equal_stages(micro_batches: int) -> None:
    layers, count = 120, 8
    starts, ends = np.triu_indices(layers + 1, 1)
    stages = [Choices(starts=starts, ends=ends, seconds=(ends - starts).astype(np.float64))] * count
    (found,) = best_splits(stages, layers, micro_batches, WantedSplits(count=1, within=1.0))
    assert (found.total, found.slowest) == (120.0, 15.0)


def test_neither_the_fastest_slowest_stage_nor_the_least_total_need_be_best() -> None:
    for seed in range(examples(60)):
        check_random_times(seed)


def check_random_times(seed: int) -> None:
    random = np.random.default_rng(seed)
    layers, count, micro_batches = 9, 4, seed % 4 + 2
    starts, ends = np.triu_indices(layers + 1, 1)
    times = random.integers(1, 100, (count, len(starts))).astype(np.float64)
    stages = [Choices(starts=starts, ends=ends, seconds=of_stage) for of_stage in times]
    table = np.zeros((count, layers + 1, layers + 1))
    table[:, starts, ends] = times
    of_all = list[float]()
    for inner in combinations(range(1, layers), count - 1):
        cuts = pairwise((0, *inner, layers))
        of_split = [float(table[number, start, end]) for number, (start, end) in enumerate(cuts)]
        of_all.append(sum(of_split) + (micro_batches - 1) * max(of_split))
    for number in (1, 5):
        found = best_splits(stages, layers, micro_batches, WantedSplits(count=number, within=np.inf))
        assert [split.seconds(micro_batches) for split in found] == sorted(of_all)[:number]


@pytest.mark.parametrize(
    ("seconds", "micro_batches", "best"),
    [
        (([16, 15, 9], [1, 2, 13]), 2, (17, 15)),
        (([14, 19, 18, 7], [15, 4, 9, 17]), 2, (24, 17)),
        (([7, 15, 19, 2, 15], [16, 15, 6, 18, 16]), 3, (23, 16)),
    ],
)
def test_a_bound_below_one_that_was_tried_may_be_the_best(
    seconds: tuple[list[int], list[int]], micro_batches: int, best: tuple[int, int]
) -> None:
    layers = len(seconds[0]) + 1
    ends, whole = np.arange(1, layers), np.full(layers - 1, layers)
    first, second = (np.array(of_stage, dtype=np.float64) for of_stage in seconds)
    stages = [
        Choices(starts=np.zeros_like(ends), ends=ends, seconds=first),
        Choices(starts=ends, ends=whole, seconds=second),
    ]
    (found,) = best_splits(stages, layers, micro_batches, WantedSplits(count=1, within=1.0))
    assert (found.total, found.slowest) == best
