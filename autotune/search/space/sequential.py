"""Orders of samples from which packing in sequence, one open pack at a time, rebuilds the packs of an epoch.

The rule is that of ms-swift's `packing_strategy: sequential` (swift/dataset/packing.py): a sample goes into the open
pack; where it does not fit, that pack is closed and the sample begins the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from trials.arrays import Ints
from trials.data.epoch import Epoch

# A choice: templates of trainers differ by a newline or a short system prompt.
_MOST_SPARE = 32
"""Most tokens by which the count of every sample may differ that are looked for."""
_PASSES = 4
"""Passes over the places where a pack would go on, each of which exchanges packs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackOrder:
    """Samples in the order of the file."""

    packs: tuple[Ints, ...]
    """Rows of the index in each pack, in the order of the file; row by row over the data ranks."""
    length: int
    """Tokens at which the trainer closes a pack."""
    moved: int
    """Packs that run in another row of their step, or on another rank, than the plan has them."""
    spare: tuple[int, int]
    """Least and most tokens that the trainer may count more for every sample, with the same packs."""


def order_of(epoch: Epoch) -> PackOrder | None:
    """Return the samples of an epoch in an order that rebuilds its packs, steps and, but for a few packs, its rows.

    In a pack the longest sample comes first, so that it fits least into the pack before. Packs are exchanged within
    their row, else within their step. None where that is not enough: some pack has so much room left that no sample
    that may come next is too long for it.
    """
    tokens = epoch.index.text_tokens.astype(np.int64)
    packs = [pack[np.argsort(-tokens[pack], kind="stable")] for pack in map(epoch.packs.pack, range(len(epoch.packs)))]
    sums, firsts, counts = epoch.packs.sums(tokens), epoch.packs.largest(tokens), epoch.packs.counts
    # Before packs are arranged, which takes longer: only the last pack may have room for every sample.
    if not counts.all() or np.count_nonzero(_least_length(sums, counts) - sums >= firsts.max()) > 1:
        return None
    chained = _Chain(epoch, sums=sums, firsts=firsts, counts=counts)
    if not chained.mended():
        return None
    length, spare = chained.length()
    return PackOrder(
        packs=tuple(packs[pack] for pack in chained.order),
        length=length,
        moved=int(np.count_nonzero(np.array(chained.order) != epoch.assignment.ravel())),
        spare=spare,
    )


def _least_length(sums: Ints, counts: Ints) -> int:
    """Return the least length that holds every pack of several samples, so that most packs are full."""
    several = sums[counts > 1]
    return int(several.max()) if len(several) else int(sums.min())


class _Chain:
    """The packs of an epoch one after the other, and the places at which one would go on instead of ending."""

    def __init__(self, epoch: Epoch, *, sums: Ints, firsts: Ints, counts: Ints) -> None:
        """`sums` are the tokens of each pack, `firsts` those of its first sample, `counts` its samples, [packs]."""
        self.order: list[int] = epoch.assignment.ravel().tolist()
        self._row, self._step = epoch.data_parallel, epoch.data_parallel * epoch.micro_batches
        self._sums: list[int] = sums.tolist()
        self._firsts: list[int] = firsts.tolist()
        self._counts: list[int] = counts.tolist()
        self._least, self._longest = _least_length(sums, counts), int(firsts.max())
        self._shortest = int(epoch.index.text_tokens.min())

    def mended(self) -> bool:
        """Exchange packs until each ends where the next begins, and return whether that was possible."""
        if not self._ends_well():
            return False
        for _ in range(_PASSES):
            bad = [place for place in range(len(self.order) - 1) if self._goes_on(place)]
            if not bad:
                return True
            for place in bad:
                if self._goes_on(place):
                    self._mend(place)
        return not any(map(self._goes_on, range(len(self.order) - 1)))

    def _ends_well(self) -> bool:
        """Move a pack with room for every sample to the end of the last step, and return whether none is elsewhere."""
        last = len(self.order) - 1
        endless = [place for place, pack in enumerate(self.order) if self._least - self._sums[pack] >= self._longest]
        for place in endless:
            if place // self._step == last // self._step:
                self._exchange(place, last)
        of_last_step = [place // self._step == last // self._step for place in endless]
        return of_last_step in ([], [True])

    def _goes_on(self, place: int) -> bool:
        """Return whether the next pack's first sample would still fit into the pack at this place."""
        if not 0 <= place < len(self.order) - 1:
            return False
        pack, following = self.order[place], self.order[place + 1]
        return self._sums[pack] < self._least and self._sums[pack] + self._firsts[following] <= self._least

    def _exchange(self, place: int, other: int) -> None:
        self.order[place], self.order[other] = self.order[other], self.order[place]

    def _mend(self, place: int) -> None:
        """Exchange the pack at a place, or the next, with one of its row, else of its step, where that helps."""
        for size in (self._row, self._step):
            for one, other in chain(self._others(place, size), self._others(place + 1, size)):
                touched = {each + by for each in (one, other) for by in (-1, 0)}
                before = sum(map(self._goes_on, touched))
                self._exchange(one, other)
                if sum(map(self._goes_on, touched)) < before:
                    return
                self._exchange(one, other)

    def _others(self, place: int, size: int) -> Iterator[tuple[int, int]]:
        first = place // size * size
        return ((place, other) for other in range(first, min(first + size, len(self.order))) if other != place)

    def length(self) -> tuple[int, tuple[int, int]]:
        """Return the length at which packs end, and the least and most tokens that every sample may have more."""
        chosen, most_spare = self._least, min(_MOST_SPARE, self._shortest - 1)
        for spare in range(most_spare + 1):
            least, most = self._lengths(spare)[0], self._lengths(-spare)[1]
            if least > most:
                break
            chosen = least

        def holds(more: int) -> bool:
            least, most = self._lengths(more)
            return least <= chosen <= most

        fewer, further = 0, 0
        while fewer > -most_spare and holds(fewer - 1):
            fewer -= 1
        while further < _MOST_SPARE and holds(further + 1):
            further += 1
        return chosen, (fewer, further)

    def _lengths(self, more: int) -> tuple[int, int]:
        """Return the least and the most length that give these packs, with `more` tokens in every sample."""
        sums = [size + more * count for size, count in zip(self._sums, self._counts, strict=True)]
        several = [sums[pack] for pack, count in enumerate(self._counts) if count > 1]
        least = max(several, default=self._least)
        ends = [
            sums[pack] + self._firsts[following] + more - 1
            for pack, following in zip(self.order, self.order[1:], strict=False)
        ]
        return least, min(ends, default=1 << 62)
