"""Best fit decreasing in two dimensions: each pack begins with the largest item left and takes what fills it best."""

from bisect import bisect_right

import numpy as np

from trials.data.sample import Ints
from trials.plan import Packed

_CLASSES = 64
"""Items are sorted into at most so many classes of vision units, each looked through by bisection over tokens."""


def pack(units: Ints, tokens: Ints, packing: Packed, seed: int) -> tuple[Ints, Ints]:
    """Takes the item with the largest share of both capacities that still fits; `seed` breaks ties.

    Above 64 vision units to a pack, units count as rounded up to the next of 64 classes.
    """
    shelves = _shelves(units, tokens, packing, np.random.default_rng(seed))
    samples: list[int] = []
    starts = [0]
    while shelves:
        free_units, free_tokens = packing.qv, packing.qt
        while (shelf := _best(shelves, free_units, free_tokens, packing)) is not None:
            item_tokens, item = shelves[shelf].take(free_tokens)
            samples.append(item)
            free_units -= shelf
            free_tokens -= item_tokens
            if not shelves[shelf].tokens:
                del shelves[shelf]
        starts.append(len(samples))
    return np.array(samples, dtype=np.int64), np.array(starts, dtype=np.int64)


class _Shelf:
    """Items of one class of units, ascending by tokens."""

    def __init__(self, tokens: list[int], items: list[int]) -> None:
        self.tokens = tokens
        self.items = items

    def take(self, most_tokens: int) -> tuple[int, int]:
        """Removes the longest item of at most so many tokens; returns its tokens and its number."""
        place = bisect_right(self.tokens, most_tokens) - 1
        return self.tokens.pop(place), self.items.pop(place)


def _shelves(units: Ints, tokens: Ints, packing: Packed, random: np.random.Generator) -> dict[int, _Shelf]:
    width = max(1, -(-packing.qv // _CLASSES))
    classes = np.minimum(-(-units // width) * width, packing.qv)
    shuffled = random.permutation(len(units))
    order = shuffled[np.argsort(tokens[shuffled], kind="stable")]
    shelves = {}
    for size in np.unique(classes).tolist():
        items = order[classes[order] == size]
        shelves[size] = _Shelf(tokens[items].tolist(), items.tolist())
    return shelves


def _best(shelves: dict[int, _Shelf], free_units: int, free_tokens: int, packing: Packed) -> int | None:
    """The class whose longest fitting item fills most; None when nothing fits."""
    best, most = None, -1.0
    for units, shelf in shelves.items():
        if units <= free_units and shelf.tokens[0] <= free_tokens:
            tokens = shelf.tokens[bisect_right(shelf.tokens, free_tokens) - 1]
            share = units / max(packing.qv, 1) + tokens / packing.qt
            if share > most:
                best, most = units, share
    return best
