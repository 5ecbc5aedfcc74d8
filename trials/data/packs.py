"""Packs: the samples of each micro-batch, in compressed sparse rows."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trials import plugins
from trials.arrays import Ints
from trials.data.index import DatasetIndex
from trials.data.levels import lowest_levels
from trials.data.packers import PACKERS
from trials.errors import AllSkipped, DataError
from trials.plan import Levelled, Packed, Packing, Padded
from trials.units import number_of

Oversize: TypeAlias = Literal["own-pack", "truncate", "skip", "fail"]
"""`data.oversize` of the job. `truncate` cuts samples before packs are built, and is `own-pack` here."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packs:
    """Pack i holds the rows `samples[starts[i] : starts[i + 1]]` of the index; it may hold none."""

    samples: Ints
    """Rows of the index in order of packs, [shown samples]."""
    starts: Ints
    """[packs + 1]"""
    padded: bool
    """Samples of a pack are padded to its longest, not joined."""
    skipped: int = 0
    """Samples left out because they are above the pack's capacity."""
    levels: Ints | None = None
    """Level of each pack, [packs]; None where there is one level."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def level_of_pack(self) -> Ints:
        """[packs], from 0."""
        return np.broadcast_to(np.int64(0), len(self)) if self.levels is None else self.levels

    def of_level(self, level: int) -> Ints:
        """Return the numbers of the packs of a level."""
        return np.flatnonzero(self.level_of_pack == level)

    def with_starts(self, more: Ints, level: int) -> "Packs":
        """Return packs with `more` starts, at each of which a new pack of the level begins."""
        starts = np.concatenate([self.starts[:-1], more])
        order = np.argsort(starts, kind="stable")
        levels = np.concatenate([self.level_of_pack, np.full(len(more), level)])[order]
        ends = np.append(starts[order], self.starts[-1])
        return replace(self, starts=ends, levels=None if self.levels is None else levels)

    def with_even_end(self, columns: int) -> "Packs":
        """Return a multiple of `columns` packs: what is left over behind it is shared by as many packs, evenly."""
        whole = len(self) // columns * columns
        if whole == len(self):
            return self
        first, end = self.starts[whole], self.starts[-1]
        shared = first + np.arange(columns + 1, dtype=np.int64) * (end - first) // columns
        return replace(self, starts=np.concatenate([self.starts[:whole], shared]))

    @property
    def counts(self) -> Ints:
        """Samples of each pack, [packs]."""
        return np.diff(self.starts)

    def pack(self, number: int) -> Ints:
        """Return the rows of one pack."""
        return self.samples[self.starts[number] : self.starts[number + 1]]

    def sums(self, column: NDArray[np.integer]) -> Ints:
        """Sum over each pack of a column of the index, [packs]."""
        return self._reduced(np.add, column)

    def largest(self, column: NDArray[np.integer]) -> Ints:
        """Return the largest entry in each pack of a column of the index, [packs]; 0 for an empty pack."""
        return self._reduced(np.maximum, column)

    def _reduced(self, function: np.ufunc, column: NDArray[np.integer]) -> Ints:
        result = np.zeros(len(self), dtype=np.int64)
        # reduceat has no notion of an empty stretch; leaving those out does not move the ends of the others.
        filled = self.counts > 0
        result[filled] = function.reduceat(column[self.samples].astype(np.int64), self.starts[:-1][filled])
        return result


def build_packs(index: DatasetIndex, order: Ints, packing: Packing, seed: int, oversize: Oversize) -> Packs:
    """Return packs of the rows in `order`, each as often as it is there, unless it is skipped as over-size.

    Raise DataError for an over-size sample under `oversize: fail`, and when there is nothing to pack.
    """
    if not len(order):
        raise DataError("the epoch contains no sample; give more of them under data.sources")
    match packing:
        case Padded(samples=size):
            starts = np.append(np.arange(0, len(order), size, dtype=np.int64), len(order))
            return Packs(samples=order, starts=starts, padded=True)
        case Packed() | Levelled():
            return _packed(index, order, packing, seed, oversize)


def _packed(index: DatasetIndex, order: Ints, packing: Packed | Levelled, seed: int, oversize: Oversize) -> Packs:
    levels = packing.levels
    units, tokens = index.vision_units[order].astype(np.int64), index.text_tokens[order].astype(np.int64)
    level = lowest_levels(units, tokens, levels)
    fits, last = level < len(levels), levels[-1]
    if oversize == "fail" and not fits.all():
        raise _above(index, order[~fits], last)
    if oversize == "skip" and not fits.any():
        raise AllSkipped(f"every sample is above qv={last.qv} qt={last.qt} and skipped; raise them")
    members, counts = [order[:0]] * len(levels), [order[:0]] * len(levels)
    # From the longest on: each level takes samples of those before it into what is free in its packs.
    for number, capacity in reversed([*enumerate(levels)]):
        own = np.flatnonzero(level == number)
        if not len(own) and len(levels) > 1:
            continue
        packer = plugins.load(PACKERS, capacity.packer)
        packed, starts = packer.pack(units[own], tokens[own], capacity, seed)
        found = own[packed], np.diff(starts)
        if len(shorter := np.flatnonzero(level < number)):
            found = filled(*found, Shelf(shorter, units, tokens), capacity)
            # Samples that fill longer packs are no longer there for the packs of their own level.
            level[found[0]] = number
        members[number], counts[number] = found
    # What is above the last level's capacity is a pack of its own, behind the others.
    alone = order[:0] if oversize == "skip" else order[~fits]
    sizes = np.concatenate([*counts, np.ones(len(alone), dtype=np.int64)])
    of_levels = [*map(len, counts[:-1]), len(counts[-1]) + len(alone)]
    return Packs(
        samples=np.concatenate([*(order[each] for each in members), alone]),
        starts=np.concatenate([[0], np.cumsum(sizes)]),
        padded=False,
        skipped=int(np.count_nonzero(~fits)) if oversize == "skip" else 0,
        levels=None if len(levels) == 1 else np.repeat(np.arange(len(levels)), of_levels),
    )


def _above(index: DatasetIndex, rows: Ints, last: Packed) -> DataError:
    """Return the error of rows above the last level of the packs."""
    lengths, samples = index.lengths(int(rows[0])), len(np.unique(rows))
    return DataError(
        f"{index.where(int(rows[0]))}: {lengths.vision_units} vision units and {lengths.text_tokens} text tokens are "
        f"above the pack's qv={last.qv} qt={last.qt}, as in {number_of(samples, 'sample')}; raise the capacities or "
        "set data.oversize to own-pack or skip"
    )


def samples_above(index: DatasetIndex, packing: Packing, oversize: Oversize) -> int:
    """Return how many samples of the index are above the capacities of a plan. Raise DataError if they must not be."""
    if isinstance(packing, Padded):
        return 0
    levels = packing.levels
    units, tokens = index.vision_units.astype(np.int64), index.text_tokens.astype(np.int64)
    above = np.flatnonzero(lowest_levels(units, tokens, levels) == len(levels))
    if oversize == "fail" and len(above):
        raise _above(index, above, levels[-1])
    return len(above)


# A choice: bounds the time for data with many units, where few of the next samples fit.
_TRIES = 64
"""Samples with too many vision units that are looked at in a row before a pack counts as full."""


class Shelf:
    """Samples by ascending tokens, from which some are taken."""

    def __init__(self, samples: Ints, units: Ints, tokens: Ints) -> None:
        """Hold `samples`, numbers in `units` and `tokens` [all samples]."""
        order = samples[np.argsort(tokens[samples], kind="stable")]
        self.units, self.tokens = units, tokens
        self._order, self._units, self._tokens = (each.tolist() for each in (order, units[order], tokens[order]))
        # Entry i leads to the last place up to i, counted from 1, that is not taken; 0 is the end.
        self._left = list(range(len(self._order) + 1))

    def take(self, free_units: int, free_tokens: int) -> list[int]:
        """Take the longest sample that fits as often as there is one."""
        taken: list[int] = []
        place, tries = self._last(bisect_right(self._tokens, free_tokens)), 0
        while place and tries < _TRIES:
            if self._units[place - 1] > free_units:
                place, tries = self._last(place - 1), tries + 1
                continue
            taken.append(self._order[place - 1])
            self._left[place] = place - 1
            free_units -= self._units[place - 1]
            free_tokens -= self._tokens[place - 1]
            place, tries = self._last(min(place - 1, bisect_right(self._tokens, free_tokens))), 0
        return taken

    def _last(self, place: int) -> int:
        found = place
        while self._left[found] != found:
            found = self._left[found]
        while self._left[place] != found:
            self._left[place], place = found, self._left[place]
        return found


def filled(members: Ints, sizes: Ints, shelf: Shelf, capacity: Packed) -> tuple[Ints, Ints]:
    """Return packs with the longest samples of the shelf that fit, for packs of (members, size of each pack).

    Members are numbers of samples, one pack after the other.
    """
    found, counts = list[Ints](), list[int]()
    for pack in np.split(members, np.cumsum(sizes)[:-1]):
        free_units = capacity.qv - int(shelf.units[pack].sum())
        more = shelf.take(free_units, capacity.qt - int(shelf.tokens[pack].sum()))
        found += [pack, np.array(more, dtype=np.int64)]
        counts.append(len(pack) + len(more))
    return np.concatenate(found), np.array(counts, dtype=np.int64)
