"""Packings of a layout that the solver's plans come from, in the order of the least time that these may take."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trials.plan import Layout, Packing


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Packings of one layout, of which the solver's plans of the first few that can be trained are starts."""

    layout: Layout
    packings: tuple[Packing, ...]
    usual: tuple[Packing, ...] = ()
    """Packs of one level, for levels of packs: to build those takes nearly as long as to solve them."""

    def bound(self, least_seconds: Callable[[Packing, Layout], float]) -> float:
        """Return the least epoch seconds of its starts, given those of a packing and layout.

        Levels of packs do the same work as the usual packs, and exchange more.
        """
        least = min(least_seconds(packing, self.layout) for packing in self.usual or self.packings)
        return least if least < math.inf or not self.usual else 0.0


def by_bound(
    origins: Iterable[Origin], least_seconds: Callable[[Packing, Layout], float]
) -> list[tuple[float, Origin]]:
    """Return (bound, origin) by ascending bounds."""
    return sorted(((each.bound(least_seconds), each) for each in origins), key=lambda pair: pair[0])
