"""The share of one rank in a pack that several ranks compute together."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One of `degree` equal parts of a pack: a contiguous part of its tokens, and of its vision units."""

    index: int = 0
    """Place of the part in the pack, from 0."""
    degree: int = 1
    """Ranks that compute the pack."""

    def part(self, tokens: int) -> slice:
        """Return the part among `tokens`, a multiple of the degree."""
        size = tokens // self.degree
        return slice(self.index * size, (self.index + 1) * size)

    def divided(self, part: "Share") -> "Share":
        """Return one of `part.degree` equal parts of this part."""
        return Share(index=self.index * part.degree + part.index, degree=self.degree * part.degree)

    def pieces(self, units: NDArray[np.int64]) -> slice:
        """Return which consecutive pieces of a pack, of `units` [pieces] vision units each, belong to the part.

        No piece is cut: it belongs to the rank in whose equal part of all units it begins.
        """
        starts = np.cumsum(units) - units
        owners = starts * self.degree // max(int(units.sum()), 1)
        first, end = np.searchsorted(owners, (self.index, self.index + 1)).tolist()
        return slice(first, end)


ALONE = Share()
"""A whole pack on one rank."""
