"""Orders of samples from which ms-swift's sequential packing rebuilds the packs of an epoch."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autotune.search.space.sequential import PackOrder, order_of
from tests.values.data import build, index_of
from trials.data.epoch import Epoch
from trials.plan import MOST_UNITS, Packed

READ_AT_ONCE = 1000


def rebuilt(lengths: Sequence[int], most: int) -> list[list[int]]:
    """The packs of the published rule. Samples are read in batches; the next goes on with an open pack."""
    packs: list[list[int]] = []
    open_pack: list[int] = []
    for first in range(0, len(lengths), READ_AT_ONCE):
        waiting = [*open_pack, *range(first, min(first + READ_AT_ONCE, len(lengths)))]
        open_pack = []
        for sample in waiting:
            if open_pack and sum(lengths[each] for each in open_pack) + lengths[sample] > most:
                packs.append(open_pack)
                open_pack = []
            open_pack.append(sample)
            if sum(lengths[each] for each in open_pack) >= most:
                packs.append(open_pack)
                open_pack = []
    return [*packs, open_pack] if open_pack else packs


def packed(epoch: Epoch, order: PackOrder, more: int = 0) -> list[list[int]]:
    """Rows of the samples of each pack that the trainer makes, where it counts `more` tokens for each sample."""
    rows = np.concatenate(order.packs)
    lengths = (epoch.index.text_tokens[rows] + more).tolist()
    return [sorted(rows[pack].tolist()) for pack in rebuilt(lengths, order.length)]


def check(epoch: Epoch, order: PackOrder) -> None:
    for more in {0, *order.spare}:
        assert packed(epoch, order, more) == [sorted(pack.tolist()) for pack in order.packs]
    assert sorted(np.concatenate(order.packs).tolist()) == sorted(epoch.packs.samples.tolist())
    row, step = epoch.data_parallel, epoch.data_parallel * epoch.micro_batches
    planned = [sorted(epoch.packs.pack(int(pack)).tolist()) for pack in epoch.assignment.ravel()]
    held = [sorted(pack.tolist()) for pack in order.packs]
    for first in range(0, len(planned), step):
        assert sorted(planned[first : first + step]) == sorted(held[first : first + step])
    assert order.moved == sum(one != other for one, other in zip(planned, held, strict=True))
    assert len(planned) % row == 0


def packing(qt: int, qv: int = MOST_UNITS) -> Packed:
    return Packed(qv=qv, qt=qt, qv_min=qv, qt_min=qt, packer="best-fit")


def ordered(rows: Sequence[tuple[int, int]], qt: int, qv: int, batch: int) -> tuple[Epoch, PackOrder]:
    """The first epoch of packs of at most this length that are rebuilt."""
    epochs = (build(index_of(rows), packing(qt - shorter, qv), batch=batch) for shorter in range(100))
    return next((epoch, order) for epoch in epochs if (order := order_of(epoch)) is not None)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 100)), min_size=8, max_size=120),
    st.sampled_from((1, 2, 3)),
    st.integers(100, 220),
    st.sampled_from((6, MOST_UNITS)),
)
def test_what_is_ordered_is_rebuilt(rows: list[tuple[int, int]], ranks: int, qt: int, qv: int) -> None:
    epoch = build(index_of(rows), packing(qt, qv), ranks=ranks)
    order = order_of(epoch)
    assume(order is not None)
    assert order is not None
    check(epoch, order)


def test_packs_of_thousands_of_samples_are_rebuilt_across_the_batches_in_which_they_are_read() -> None:
    lengths = np.random.default_rng(0).integers(20, 400, 3500)
    check(*ordered([(1, int(each)) for each in lengths], 1024, MOST_UNITS, batch=64))


def test_packs_that_end_too_early_are_exchanged_within_their_step() -> None:
    """With few units in a pack, many packs have room for short samples, which must not come next."""
    random = np.random.default_rng(1)
    rows = [(int(random.integers(1, 6)), int(random.integers(100, 400))) for _ in range(400)]
    epoch, order = ordered(rows, 1000, 12, batch=32)
    assert order.moved > 0
    check(epoch, order)


def test_a_sample_above_the_length_is_a_pack_of_its_own() -> None:
    rows = [(1, 60)] * 12 + [(1, 500)] * 2
    epoch = build(index_of(rows), packing(120), ranks=2)
    order = order_of(epoch)
    assert order is not None
    assert order.length < 500
    check(epoch, order)


@pytest.mark.parametrize("lengths", [[10] * 9, [30] * 3], ids=["room for all", "several with room"])
def test_packs_with_room_for_every_sample_are_refused(lengths: list[int]) -> None:
    """Three packs of 4, 4 and 1, of which one is halved for two ranks; nothing can end the halves."""
    assert order_of(build(index_of([(1, each) for each in lengths]), packing(40), ranks=2)) is None
