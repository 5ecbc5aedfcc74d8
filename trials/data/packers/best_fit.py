"""Best fit decreasing in two dimensions: the largest item left goes where most room is.

With the fullest pack in place of the one with most room, as in the usual rule, the first packs would hold long items
alone and the last ones hundreds of short ones, and steps would differ by the packs that they have. Most room (worst fit
decreasing; Johnson, "Near-optimal bin packing algorithms", 1973, section 2.2) spreads short items over all packs, and
needs hardly more of them, since the packs are as many as the items fill.

The search counts packs on a histogram of sizes instead, with the usual rule. Items of one size are one entry with a
count. So a pack that is found once is repeated as often as its sizes last, and the time depends on the number of sizes
rather than of items (as in Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021, section 3.2,
for one dimension).
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import chain, repeat, starmap

import numpy as np

from trials.arrays import Floats, Ints
from trials.plan import Packed

RELAXES = False

_WINDOW_LOAD = 31.7
"""Packs that the items of a window fill without a gap, at most: nearly 32, in which there is some room to choose."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sizes:
    """A histogram of items, as columns [sizes], ascending by units, then by tokens."""

    units: Ints
    tokens: Ints
    counts: Ints

    @classmethod
    def of(cls, units: Ints, tokens: Ints, counts: Ints | None = None) -> "Sizes":
        """Return the histogram of items, or of entries that stand for `counts` items each."""
        keys, places = np.unique(np.stack([units, tokens], axis=1), axis=0, return_inverse=True)
        summed = np.bincount(places, weights=counts, minlength=len(keys)).astype(np.int64)
        return cls(units=keys[:, 0], tokens=keys[:, 1], counts=summed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """A number of packs that hold the same sizes."""

    packs: int
    sizes: tuple[int, ...]
    """Positions in the histogram, one for each item of a pack."""


def pack(units: Ints, tokens: Ints, packing: Packed, seed: int) -> tuple[Ints, Ints]:
    """Deal the items to random windows of packs, which `_filled` fills, and what fits nowhere to further windows."""
    random = np.random.default_rng(seed)
    sizes = np.stack([units, tokens]).astype(np.float64)
    capacity = np.array([packing.qv, packing.qt], dtype=np.float64)
    shares = sizes / np.maximum(capacity, 1)[:, None]
    # A stable sort of shuffled items leaves those of one size in random order.
    shuffled = random.permutation(len(units))
    left = shuffled[np.argsort(-shares.sum(axis=0)[shuffled], kind="stable")]
    sizes, shares = sizes[:, left], shares[:, left]
    pack_of_item, packs = np.empty(len(units), dtype=np.int64), 0
    while len(left):
        load = float(shares.sum(axis=1).max())
        windows = max(1, math.ceil(load / _WINDOW_LOAD))
        each = max(1, math.ceil(load / windows))
        placed = _filled(sizes, shares, capacity, (windows, each), random)
        is_placed = placed >= 0
        pack_of_item[left[is_placed]] = packs + placed[is_placed]
        packs, left = packs + windows * each, left[~is_placed]
        sizes, shares = sizes[:, ~is_placed], shares[:, ~is_placed]
    counts = np.bincount(pack_of_item)
    return np.argsort(pack_of_item, kind="stable"), np.concatenate([[0], np.cumsum(counts[counts > 0])])


def _filled(
    sizes: Floats, shares: Floats, capacity: Floats, shape: tuple[int, int], random: np.random.Generator
) -> Ints:
    """Return the pack of each item, [items]; -1 where the packs of its window have no room for it.

    `sizes` and `shares` of the capacity, both [2, items], fall; `shape` is (windows, packs of each). All windows
    take an item at a time, each into the pack of it with most room.
    """
    windows, each = shape
    # Each window has one of every few items of like size; none is one that fits nowhere.
    turns, none = -(-sizes.shape[1] // windows), sizes.shape[1]
    dealt = np.append(np.arange(none), np.full(turns * windows - none, none)).reshape(turns, windows)
    units, tokens = np.append(sizes, np.full((2, 1), np.inf), axis=1)
    share = np.append(shares.sum(axis=0), 0)
    free_units, free_tokens = (np.full((windows, each), most) for most in capacity)
    room = np.full((windows, each), 2.0)
    found = np.full(none, -1)
    for items in random.permuted(dealt, axis=1):
        fits = (free_units >= units[items, None]) & (free_tokens >= tokens[items, None])
        most = np.where(fits, room, -np.inf).argmax(axis=1)
        window = np.flatnonzero(fits[np.arange(windows), most])
        taken, of_window = items[window], most[window]
        free_units[window, of_window] -= units[taken]
        free_tokens[window, of_window] -= tokens[taken]
        room[window, of_window] -= share[taken]
        found[taken] = window * each + of_window
    return found


def patterns(sizes: Sizes, packing: Packed) -> list[Pattern]:
    """Return packs that use up the histogram; every size fits the capacities."""
    shelves = _Shelves(sizes)
    found = []
    while shelves.by_units:
        taken = _fullest(shelves, packing)
        # A pattern repeats until its scarcest size is used up.
        packs = min(shelves.left[size] // times for size, times in taken.items())
        found.append(Pattern(packs=packs, sizes=tuple(chain.from_iterable(starmap(repeat, taken.items())))))
        shelves.remove(taken, packs)
    return found


class _Shelves:
    """The sizes that are left: for each number of units, descending, their tokens ascending."""

    def __init__(self, sizes: Sizes) -> None:
        self.left = sizes.counts.tolist()
        self._units, self._tokens = sizes.units.tolist(), sizes.tokens.tolist()
        self.longest = max(self._tokens, default=0)
        self.by_units: dict[int, tuple[list[int], list[int]]] = {
            units: ([], []) for units in sorted({*self._units}, reverse=True)
        }
        for size, (units, tokens) in enumerate(zip(self._units, self._tokens, strict=True)):
            shelf = self.by_units[units]
            shelf[0].append(tokens)
            shelf[1].append(size)

    def remove(self, taken: dict[int, int], packs: int) -> None:
        for size, times in taken.items():
            self.left[size] -= times * packs
            if not self.left[size]:
                units = self._units[size]
                tokens, numbers = self.by_units[units]
                place = bisect_left(tokens, self._tokens[size])
                del tokens[place], numbers[place]
                if not tokens:
                    del self.by_units[units]


def _fullest(shelves: _Shelves, packing: Packed) -> dict[int, int]:
    """Return how often one pack takes each size."""
    taken: dict[int, int] = {}
    left, most_units = shelves.left, max(packing.qv, 1)
    free_units, free_tokens = packing.qv, packing.qt
    while True:
        best, most = None, -1.0
        most_tokens = min(free_tokens, shelves.longest) / packing.qt
        for units, (tokens, numbers) in shelves.by_units.items():
            if units > free_units:
                continue
            if units / most_units + most_tokens < most:
                break  # nor can a size of fewer units
            place = bisect_right(tokens, free_tokens) - 1
            # The longest size that fits and is left.
            while place >= 0 and (number := numbers[place]) in taken and taken[number] >= left[number]:
                place -= 1
            # Of samples with equal shares, the one with fewest units is taken.
            if place >= 0 and (share := units / most_units + tokens[place] / packing.qt) >= most:
                best, most = (units, tokens[place], numbers[place]), share
        if best is None:
            return taken
        free_units -= best[0]
        free_tokens -= best[1]
        taken[best[2]] = taken.get(best[2], 0) + 1
