"""Best fit decreasing in two dimensions, on the histogram of the items' sizes.

Items of one size are one entry with a count. So a pack that is found once is repeated as often as its sizes last, and
the time depends on the number of sizes rather than of items (as in Krell et al., "Efficient Sequence Packing without
Cross-contamination", 2021, section 3.2, for one dimension).
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import chain, repeat, starmap

import numpy as np

from trials.data.records.sample import Ints
from trials.plan import Packed

RELAXES = False
DRAWS = False

_UNIT_SIZES = 64
_SIZES = 4096
"""Most different sizes of vision units, and of both together: above that, sizes are rounded up."""


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
    """Take the size with the largest share of both capacities that still fits; `seed` chooses items of a size."""
    # Sizes are rounded up by the least grain that leaves few of them.
    alone = np.unique(units)
    units = _up(units, _grain(alone, np.zeros_like(alone), packing.qv, _UNIT_SIZES), packing.qv)
    of_units, of_tokens = np.divmod(np.unique(units * (packing.qt + 1) + tokens), packing.qt + 1)
    tokens = _up(tokens, _grain(of_tokens, of_units, packing.qt, _SIZES), packing.qt)
    # One number for each pair of sizes, since no token count is above qt.
    key = units * (packing.qt + 1) + tokens
    # A stable sort of shuffled items leaves those of one size in random order.
    shuffled = np.random.default_rng(seed).permutation(len(key))
    by_size = shuffled[np.argsort(key[shuffled], kind="stable")]
    _, firsts, counts = np.unique(key[by_size], return_index=True, return_counts=True)
    sizes = Sizes(units=units[by_size[firsts]], tokens=tokens[by_size[firsts]], counts=counts)
    found = patterns(sizes, packing)
    packs, held = np.array([(each.packs, len(each.sizes)) for each in found], dtype=np.int64).reshape(-1, 2).T
    cursor, first_items = firsts.tolist(), list[int]()
    for pattern in found:
        for size in pattern.sizes:
            first_items.append(cursor[size])
            cursor[size] += pattern.packs
    # Each pack of a pattern takes the next item of each of its sizes.
    pattern_of_pack = np.repeat(np.arange(len(found)), packs)
    counts = held[pattern_of_pack]
    entries = _counted(counts) + np.repeat((np.cumsum(held) - held)[pattern_of_pack], counts)
    items = np.array(first_items, dtype=np.int64)[entries] + np.repeat(_counted(packs), counts)
    return by_size[items], np.concatenate([[0], np.cumsum(counts)])


def _counted(lengths: Ints) -> Ints:
    """Return 0, 1, ... for stretches of these lengths, one after the other."""
    counted: Ints = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return counted


def patterns(sizes: Sizes, packing: Packed) -> list[Pattern]:
    """Return packs that use up the histogram; every size fits the capacities."""
    shelves = _Shelves(sizes)
    found = []
    while shelves.by_units:
        taken = _fullest(shelves, packing)
        # As often as its scarcest size lasts.
        packs = min(shelves.left[size] // times for size, times in taken.items())
        found.append(Pattern(packs=packs, sizes=tuple(chain.from_iterable(starmap(repeat, taken.items())))))
        shelves.remove(taken, packs)
    return found


class _Shelves:
    """The sizes that are left: for each number of units, descending, their tokens ascending."""

    def __init__(self, sizes: Sizes) -> None:
        self.left = sizes.counts.tolist()
        self._units, self._tokens = sizes.units.tolist(), sizes.tokens.tolist()
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
        most_tokens = free_tokens / packing.qt
        for units, (tokens, numbers) in shelves.by_units.items():
            if units > free_units:
                continue
            if units / most_units + most_tokens < most:
                break  # nor can a size of fewer units
            place = bisect_right(tokens, free_tokens) - 1
            # The longest size that fits and is left.
            while place >= 0 and (number := numbers[place]) in taken and taken[number] >= left[number]:
                place -= 1
            # Of equal shares the fewest units.
            if place >= 0 and (share := units / most_units + tokens[place] / packing.qt) >= most:
                best, most = (units, tokens[place], numbers[place]), share
        if best is None:
            return taken
        free_units -= best[0]
        free_tokens -= best[1]
        taken[best[2]] = taken.get(best[2], 0) + 1


def _grain(sizes: Ints, others: Ints, most: int, different: int) -> int:
    """Return the least power of 2 to which sizes are rounded up for at most `different` pairs with `others`."""
    grain = 1
    while len(np.unique(others * (most + 1) + _up(sizes, grain, most))) > different:
        grain *= 2
    return grain


def _up(sizes: Ints, grain: int, most: int) -> Ints:
    rounded: Ints = np.minimum(-(-sizes // grain) * grain, most)
    return rounded
