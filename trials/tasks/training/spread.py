"""A time of several ranks as few numbers."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A time of several ranks, in seconds. It needs the same room for any number of them."""

    median: float
    """The lower one of two, so that it is not that of the slower of two ranks."""
    greatest: float
    rank: int
    """The one with the greatest."""

    @classmethod
    def of(cls, seconds: Mapping[int, float]) -> Self:
        """Return the spread of times by rank."""
        rank = max(seconds, key=seconds.__getitem__)
        return cls(median=statistics.median_low(seconds.values()), greatest=seconds[rank], rank=rank)

    @classmethod
    def mean(cls, spreads: Sequence["Spread"], weights: Sequence[int]) -> Self:
        """Return the weighted means, and the rank that was most often the one with the greatest."""
        ranks = Counter[int]()
        for each, weight in zip(spreads, weights, strict=True):
            ranks[each.rank] += weight
        return cls(
            median=statistics.fmean((each.median for each in spreads), weights),
            greatest=statistics.fmean((each.greatest for each in spreads), weights),
            rank=ranks.most_common(1)[0][0],
        )

    def times(self, factor: float) -> "Spread":
        return Spread(median=self.median * factor, greatest=self.greatest * factor, rank=self.rank)
