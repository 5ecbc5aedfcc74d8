"""The room that long samples leave in their packs, filled with shorter ones (HBP, greedy fill)."""

from bisect import bisect_right

import numpy as np

from trials.arrays import Ints
from trials.plan import Packed

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
