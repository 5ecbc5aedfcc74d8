import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.values.data import index_of, lengths
from trials import plugins
from trials.data.index import DatasetIndex, profile
from trials.data.order import epoch_order
from trials.data.packers import PACKERS, isf
from trials.data.packers.best_fit import Sizes, patterns
from trials.data.packs import Oversize, build_packs
from trials.errors import DataError
from trials.plan import Packed, Padded

NAMES = plugins.names(PACKERS)


@st.composite
def packings(draw: st.DrawFn) -> Packed:
    qv, qt = draw(st.integers(0, 100)), draw(st.integers(1, 600))
    return Packed(
        qv=qv,
        qt=qt,
        qv_min=draw(st.integers(0, qv)),
        qt_min=draw(st.integers(0, qt)),
        packer=draw(st.sampled_from(NAMES)),
    )


UNEQUALLY_ROUNDED = [
    (11, 56), (0, 240), (9, 242), (8, 231), (2, 85), (1, 23), (3, 199), (10, 240), (3, 72), (5, 2), (3, 144), (7, 15),
    (12, 148),
]  # fmt: skip
"""Cutting stock adds the same prices in two orders, whose sums differ in the last bit."""


def all_rows(index: DatasetIndex) -> np.ndarray:
    return np.arange(len(index), dtype=np.int64)


def test_the_packers_are_found_by_name() -> None:
    assert NAMES == ("best-fit", "cutting-stock", "isf")


@given(lengths, packings(), st.integers(0, 2**31 - 1))
@example(UNEQUALLY_ROUNDED, Packed(qv=89, qt=473, qv_min=38, qt_min=75, packer="cutting-stock"), 638)
def test_every_sample_is_packed_exactly_once_and_within_the_capacities(
    rows: list[tuple[int, int]], packing: Packed, seed: int
) -> None:
    index = index_of(rows)
    packs = build_packs(index, all_rows(index), packing, seed, "own-pack")
    assert sorted(packs.samples) == list(range(len(index)))
    assert (packs.counts > 0).all()
    within = (packs.sums(index.vision_units) <= packing.qv) & (packs.sums(index.text_tokens) <= packing.qt)
    assert (within | (packs.counts == 1)).all()
    oversize = (index.vision_units > packing.qv) | (index.text_tokens > packing.qt)
    assert np.count_nonzero(~within) == np.count_nonzero(oversize)


@pytest.mark.parametrize("packer", NAMES)
def test_capacities_of_many_units_are_kept_too(packer: str) -> None:
    index = index_of([(3, 1)] * 200)
    packs = build_packs(index, all_rows(index), Packed(qv=100, qt=999, qv_min=90, qt_min=900, packer=packer), 0, "fail")
    assert packs.sums(index.vision_units).max() <= 99  # best fit spreads the samples over the packs
    assert len(packs) == 7  # the fewest


@given(lengths, packings(), st.integers(0, 9))
def test_packs_are_the_same_for_the_same_seed(rows: list[tuple[int, int]], packing: Packed, seed: int) -> None:
    index = index_of(rows)
    one, other = (build_packs(index, all_rows(index), packing, seed, "own-pack") for _ in range(2))
    assert one.samples.tolist() == other.samples.tolist()
    assert one.starts.tolist() == other.starts.tolist()


@pytest.mark.parametrize("packer", NAMES)
def test_another_seed_gives_other_packs(packer: str) -> None:
    index = index_of([(1, 50)] * 40)
    packing = Packed(qv=9, qt=200, qv_min=9, qt_min=200, packer=packer)
    one, other = (build_packs(index, all_rows(index), packing, seed, "fail") for seed in (0, 1))
    assert one.samples.tolist() != other.samples.tolist()


def mixed(count: int) -> DatasetIndex:
    random = np.random.default_rng(0)
    units = random.choice([0, 1, 3, 4, 5], count, p=[0.08, 0.35, 0.25, 0.1, 0.22])
    tokens = np.minimum(units * 16 + random.lognormal(4, 0.8, count).astype(int) + 20, 500)
    return index_of(list(zip(units.tolist(), tokens.tolist(), strict=True)))


# The rest of `cutting-stock` is spread over packs by best fit, where the fullest pack would end at 1.015.
@pytest.mark.parametrize(("packer", "most"), [("isf", 1.08), ("best-fit", 1.04), ("cutting-stock", 1.025)])
def test_packs_are_nearly_as_few_as_the_capacities_allow(packer: str, most: float) -> None:
    index = mixed(3000)
    packing = Packed(qv=18, qt=700, qv_min=18, qt_min=680, packer=packer)
    packs = build_packs(index, all_rows(index), packing, 0, "fail")
    assert len(packs) <= most * max(index.vision_units.sum() / 18, index.text_tokens.sum() / 700)


@given(lengths, packings(), st.integers(0, 9))
def test_cutting_stock_never_needs_more_packs_than_best_fit(
    rows: list[tuple[int, int]], packing: Packed, seed: int
) -> None:
    index = index_of(rows)
    best_fit, cutting_stock = (
        build_packs(index, all_rows(index), replace(packing, packer=packer), seed, "own-pack")
        for packer in ("best-fit", "cutting-stock")
    )
    assert len(cutting_stock) <= len(best_fit)


@pytest.mark.parametrize("tokens", [1000, 40])
def test_cutting_stock_finds_the_fewest_packs_where_best_fit_does_not(tokens: int) -> None:
    """Either of the capacities binds; 5 + 5 + 1 fills as well as 5 + 3 + 3, but then the threes fill nothing."""
    index = index_of([(units, 4 * units) for units, count in ((5, 200), (3, 100), (1, 75)) for _ in range(count)])
    packing = Packed(qv=11 if tokens == 1000 else 99, qt=tokens + 4, qv_min=0, qt_min=0, packer="cutting-stock")
    assert len(build_packs(index, all_rows(index), packing, 0, "fail")) == 125
    best_fit = replace(packing, packer="best-fit")
    assert len(build_packs(index, all_rows(index), best_fit, 0, "fail")) > 125


def test_packs_of_cutting_stock_do_not_depend_on_linear_algebra_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("solve", "inv", "lstsq"):
        monkeypatch.setattr(np.linalg, name, None)
    for name in ("dot", "matmul", "einsum"):
        monkeypatch.setattr(np, name, None)
    packing = Packed(qv=12, qt=512, qv_min=12, qt_min=500, packer="cutting-stock")
    index = mixed(500)
    assert len(build_packs(index, all_rows(index), packing, 0, "fail"))


def test_rounds_of_filtering_fill_the_packs_better_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    index = mixed(3000)
    packing = Packed(qv=12, qt=512, qv_min=12, qt_min=500)
    filtered = len(build_packs(index, all_rows(index), packing, 0, "fail"))
    monkeypatch.setattr(isf, "MAX_ROUNDS", 1)
    assert filtered < 0.95 * len(build_packs(index, all_rows(index), packing, 0, "fail"))


@given(lengths, packings())
def test_each_pack_of_a_histogram_takes_the_largest_size_left_that_fits(
    rows: list[tuple[int, int]], packing: Packed
) -> None:
    fitting = [row for row in rows if row[0] <= packing.qv and row[1] <= packing.qt]
    sizes = Sizes.of(*np.array(fitting, dtype=np.int64).reshape(-1, 2).T)
    found = [size for pattern in patterns(sizes, packing) for size in pattern.packs * (*pattern.sizes, None)]
    left, free, expected = Counter(fitting), [packing.qv, packing.qt], list[tuple[int, int] | None]()

    def share(size: tuple[int, int]) -> tuple[float, int]:
        return size[0] / max(packing.qv, 1) + size[1] / packing.qt, -size[0]

    while +left or free != [packing.qv, packing.qt]:
        some = [size for size in +left if size[0] <= free[0] and size[1] <= free[1]]
        taken = max(some, key=share, default=None)
        expected.append(taken)
        left.subtract([taken] if taken else [])
        free = [free[0] - taken[0], free[1] - taken[1]] if taken else [packing.qv, packing.qt]
    assert [None if size is None else (int(sizes.units[size]), int(sizes.tokens[size])) for size in found] == expected


@pytest.mark.parametrize("oversize", ["skip", "own-pack"])
def test_an_oversize_sample_is_skipped_and_counted_or_alone(oversize: Oversize) -> None:
    index = index_of([(1, 10), (9, 10), (1, 900), (1, 10)])
    packs = build_packs(index, all_rows(index), Packed(qv=4, qt=100, qv_min=0, qt_min=0), 0, oversize)
    shown = [sorted(packs.pack(number).tolist()) for number in range(len(packs))]
    assert (shown, packs.skipped) == (([[0, 3]], 2) if oversize == "skip" else ([[0, 3], [1], [2]], 0))


def test_an_oversize_sample_fails_with_its_line_where_the_job_says_so() -> None:
    index = index_of([(1, 10), (9, 10)])
    with pytest.raises(DataError, match=r"/data/0.jsonl:2: 9 vision units and 10 text tokens are above .* qv=4 qt=100"):
        build_packs(index, all_rows(index), Packed(qv=4, qt=100, qv_min=0, qt_min=0), 0, "fail")


def test_packs_of_skipped_samples_alone_are_refused() -> None:
    index = index_of([(9, 10)])
    with pytest.raises(DataError, match="every sample is above qv=4 qt=100"):
        build_packs(index, all_rows(index), Packed(qv=4, qt=100, qv_min=0, qt_min=0), 0, "skip")


@given(lengths, st.integers(1, 9))
def test_padded_packs_cut_the_order_into_equal_micro_batches(rows: list[tuple[int, int]], size: int) -> None:
    index = index_of(rows)
    order = all_rows(index)[::-1]
    packs = build_packs(index, order, Padded(samples=size), 0, "fail")
    assert packs.samples.tolist() == order.tolist()
    assert packs.counts[:-1].tolist() == [size] * (len(packs) - 1)
    assert 0 < packs.counts[-1] <= size
    assert packs.largest(index.text_tokens).max() == index.text_tokens.max()


@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_shows_each_sample_as_often_as_its_repeat(count: int, seed: int, epoch: int) -> None:
    index = index_of([(1, 1)] * 4 * count, repeats=(2.0, 0.5, 1.25, 1.0))
    times = np.bincount(epoch_order(index, seed, epoch), minlength=len(index))
    by_file = [times[index.file == number] for number in range(4)]
    assert [set(times.tolist()) for times in (by_file[0], by_file[3])] == [{2}, {1}]
    assert set(by_file[1].tolist()) <= {0, 1}
    assert set(by_file[2].tolist()) <= {1, 2}
    assert [times.sum() for times in by_file] == [
        *(2 * count, math.ceil(count / 2), count + math.ceil(count / 4), count)
    ]
    assert index.repeats.sum() == pytest.approx(times.sum())


@pytest.mark.parametrize(
    ("repeat", "samples", "shown"), [(0.5, 1, 1), (0.4, 1, 1), (1.3, 10, 13), (1000.001, 1000, 1000001), (3 / 7, 7, 3)]
)
def test_a_part_of_a_repeat_is_rounded_up(repeat: float, samples: int, shown: int) -> None:
    index = index_of([(1, 1)] * samples, repeats=(repeat,))
    assert len(epoch_order(index, 0, 0)) == profile(index).samples == shown


def test_the_random_part_of_a_repeat_depends_on_the_seed_and_not_on_the_epoch() -> None:
    index = index_of([(1, 1)] * 100, repeats=(0.5,))
    first, second, other = (epoch_order(index, seed, epoch).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0)))
    assert first != second
    assert sorted(first) == sorted(second)
    assert sorted(first) != sorted(other)


def test_an_epoch_without_samples_is_refused() -> None:
    index = index_of([(1, 1)])
    with pytest.raises(DataError, match="the epoch contains no sample; give more of them"):
        build_packs(index, np.zeros(0, dtype=np.int64), Padded(samples=2), 0, "fail")
