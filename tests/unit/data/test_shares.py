"""The parts of packs that ranks share, and the steps of such packs."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autotune.packing.packs_file import write_packs
from tests.values.data import build, index_of, lengths
from trials.errors import DataError
from trials.plan import Packed
from trials.sharing.group import _overlaps
from trials.sharing.share import Share

PACKED = Packed(qv=20, qt=400, qv_min=16, qt_min=350)
degrees = st.integers(1, 8)


@given(st.lists(st.integers(1, 9), max_size=12), degrees)
def test_every_piece_of_a_pack_belongs_to_one_rank_in_order(units: list[int], degree: int) -> None:
    sizes = np.array(units, dtype=np.int64)
    parts = [Share(index=index, degree=degree).pieces(sizes) for index in range(degree)]
    assert [place for part in parts for place in range(part.start, part.stop)] == list(range(len(units)))
    assert all(sizes[part].sum() <= sizes.sum() / degree + sizes.max(initial=0) for part in parts)


@given(st.integers(0, 9), degrees)
def test_the_tokens_of_a_pack_are_cut_into_equal_parts(each: int, degree: int) -> None:
    tokens = np.arange(each * degree)
    parts = [tokens[Share(index=index, degree=degree).part(len(tokens))] for index in range(degree)]
    assert {len(part) for part in parts} == {each}
    assert np.concatenate(parts).tolist() == tokens.tolist()


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_rows_go_where_another_division_of_them_has_them(mine: list[int], random: np.random.Generator) -> None:
    rows = sum(mine)
    ends = sorted(random.randint(0, rows) for _ in mine[1:])  # type: ignore[attr-defined]
    others = np.diff([0, *ends, rows]).tolist()
    owner, taker = (np.repeat(np.arange(len(mine)), sizes) for sizes in (mine, others))
    for index in range(len(mine)):
        assert _overlaps(mine, others, index) == [np.sum((owner == index) & (taker == k)) for k in range(len(mine))]


@given(lengths, st.sampled_from([(1, 2), (2, 2), (2, 4), (3, 6), (4, 4)]))
@example([(0, 192), (0, 210), (2, 1), (2, 209), (2, 209), (3, 192)], (3, 6))  # ties, unless a third is rounded
@example(
    [(0, 170), (0, 1), (0, 106), (0, 1), (0, 168), (1, 126), (0, 231), (0, 232), (1, 1), (0, 1)], (3, 6)
)  # exactly as far from the batch as is allowed
def test_ranks_that_share_have_the_steps_of_fewer_ranks(
    rows: list[tuple[int, int]], degree_and_ranks: tuple[int, int]
) -> None:
    degree, ranks = degree_and_ranks
    shared = build(index_of(rows), replace(PACKED, sequence=degree), ranks=ranks)
    alone = build(index_of(rows), PACKED, ranks=ranks // degree)
    assert shared.assignment.tolist() == np.repeat(alone.assignment, degree, axis=1).tolist()
    assert [shared.part(0, rank).share.index for rank in range(ranks)] == [rank % degree for rank in range(ranks)]
    steps = [shared.step(number) for number in range(shared.steps)]
    shown = Counter(int(row) for step in steps for of_rank in step.packs for pack in of_rank for row in pack)
    assert shown == Counter(range(len(rows)))
    totals = [(step.samples, step.target_tokens, step.micro_batches) for step in steps]
    of_alone = [alone.step(number) for number in range(alone.steps)]
    assert totals == [(step.samples, step.target_tokens, step.micro_batches) for step in of_alone]


def test_a_file_of_packs_has_a_shared_one_once(tmp_path: Path) -> None:
    epoch = build(index_of([(1, 90)] * 37), replace(PACKED, sequence=2), ranks=4)
    write_packs(tmp_path / "packs.jsonl", epoch)
    lines = [json.loads(line) for line in (tmp_path / "packs.jsonl").read_text().splitlines()]
    assert sorted(row for line in lines for row in line["samples"]) == list(range(37))
    assert {line["rank"] for line in lines} == {0, 2}


def test_ranks_that_no_degree_divides_are_refused() -> None:
    with pytest.raises(DataError, match="shared by 2 ranks, which do not divide 3 data ranks; give 4"):
        build(index_of([(1, 10)]), replace(PACKED, sequence=2), ranks=3)
