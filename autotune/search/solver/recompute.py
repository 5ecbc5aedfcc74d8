"""Numbers of layers that stages recompute to fit the memory, for many stages at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.costs import Array
from autotune.prediction.parts import LANGUAGE, Parts
from autotune.search.solver.holdings import Holdings
from trials.data.records.sample import Ints

Bools: TypeAlias = NDArray[np.bool_]
Fits: TypeAlias = Callable[[Holdings, Ints, Ints], Bools]
"""Returns which holdings fit the memory with these numbers of vision and of language layers recomputed."""

_NEVER = 1 << 30
"""More layers than any stage has."""
_LEAST_SECONDS = 1e-300
_ROUNDING = 1e-6
_ROUNDED = 1 + 1e-9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSeconds:
    """Seconds of the mean pack by kind of layer, in the order of KINDS."""

    kept: Array
    """Forward and backward."""
    recomputed: Array
    """Seconds that recomputing the layer adds."""

    def of(self, parts: Parts) -> Array:
        """Return the seconds of each stage, [stages]."""
        seconds: Array = parts.layers @ self.kept + parts.recomputed @ self.recomputed
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Level:
    """The packs of one level, to which recompute counts of their own belong."""

    fits: Fits
    """Enough for packs of the level to fit with those of other levels."""
    seconds: LayerSeconds
    row_share: float
    """Share of the rows of the epoch."""


def mean_seconds(levels: Sequence[Level]) -> LayerSeconds:
    """Return the seconds of the mean row, when the same layers are recomputed at every level."""
    kept, recomputed = (
        np.sum([level.row_share * getattr(level.seconds, side) for level in levels], axis=0)
        for side in ("kept", "recomputed")
    )
    return LayerSeconds(kept=kept, recomputed=recomputed)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recomputes:
    """Recompute counts with which holdings fit, all [holdings]."""

    vision: Ints
    language: Ints
    seconds: Array
    """Seconds of the stage; infinite where it does not fit within its bound."""


def least_of_alternatives(
    holdings: Holdings, alternatives: Sequence[Sequence[Level]], bounds: Array
) -> tuple[tuple[Recomputes, ...], Array]:
    """Return (the counts for packs of each level, seconds of each holding for the mean row within its bound).

    Each holding has those of the alternative with the least time.
    """
    found = [_least_of_levels(holdings, levels, bounds) for levels in alternatives]
    if len(found) == 1:
        return found[0]
    best, every = np.argmin([seconds for _, seconds in found], axis=0), np.arange(len(holdings))

    def chosen(of_alternatives: Sequence[Ints | Array]) -> Any:
        return np.stack(of_alternatives)[best, every]

    counts = tuple(
        Recomputes(
            **{side: chosen([getattr(each, side) for each in of_level]) for side in ("vision", "language", "seconds")}
        )
        for of_level in zip(*(of_levels for of_levels, _ in found), strict=True)
    )
    return counts, chosen([seconds for _, seconds in found])


def _least_of_levels(
    holdings: Holdings, levels: Sequence[Level], bounds: Array
) -> tuple[tuple[Recomputes, ...], Array]:
    """Return the same of one alternative, in which the levels are independent of each other."""
    if len(levels) == 1:
        found = least_recomputes(holdings, levels[0].fits, levels[0].seconds, bounds)
        return (found,), found.seconds
    nothing = _nothing(holdings)
    least = np.stack([level.row_share * level.seconds.of(holdings.parts(nothing, nothing)) for level in levels])
    spare = bounds - least.sum(axis=0)
    several = tuple(
        least_recomputes(holdings, level.fits, level.seconds, _ROUNDED * (of_level + spare) / level.row_share)
        for level, of_level in zip(levels, least, strict=True)
    )
    seconds = np.sum([level.row_share * found.seconds for level, found in zip(levels, several, strict=True)], axis=0)
    return several, np.where(seconds <= _ROUNDED * bounds, seconds, np.inf)


def least_recomputes(holdings: Holdings, fits: Fits, seconds: LayerSeconds, bounds: Array) -> Recomputes:
    """Return the pair of counts of least time with which each holding fits; of equal ones, the fewest vision layers.

    For each number of vision layers, only the fewest language layers that fit are considered, among those that the
    holding's bound in seconds allows.
    """
    holding = np.repeat(np.arange(len(holdings)), holdings.vision + 1)
    # 0, 1, ... up to the vision layers of each holding.
    vision = np.arange(len(holding)) - (np.cumsum(holdings.vision + 1) - holdings.vision - 1)[holding]

    def times(holding: Ints, vision: Ints, language: Ints) -> Array:
        return seconds.of(holdings[holding].parts(vision, language))

    spare = bounds[holding] - times(holding, vision, np.zeros_like(vision))
    rows = np.flatnonzero(spare >= 0)
    holding, vision = holding[rows], vision[rows]
    tried = holdings[holding]
    taken = max(float(seconds.recomputed[LANGUAGE]), _LEAST_SECONDS)
    # Rounded up if in doubt: what is too slow is dropped below.
    affordable = np.minimum(tried.language, (spare[rows] / taken + _ROUNDING).clip(max=_NEVER).astype(np.int64))
    language = _fewest(lambda rows, count: fits(tried[rows], vision[rows], count), tried.language, affordable)
    rows = np.flatnonzero(language < _NEVER)
    holding, vision, language = holding[rows], vision[rows], language[rows]
    needed = times(holding, vision, language)
    # The sort is stable and vision counts ascend within a holding, so of equal times the fewest vision layers win.
    best = np.lexsort((needed, holding))
    best = best[np.unique(holding[best], return_index=True)[1]]
    best = best[needed[best] <= bounds[holding[best]]]
    found = Recomputes(vision=_nothing(holdings), language=_nothing(holdings), seconds=np.full(len(holdings), np.inf))
    for all_of_them, counted in ((found.vision, vision), (found.language, language), (found.seconds, needed)):
        all_of_them[holding[best]] = counted[best]
    return found


def _nothing(holdings: Holdings) -> Ints:
    return np.zeros(len(holdings), dtype=np.int64)


def _fewest(fits: Callable[[Ints, Ints], Bools], all_of_them: Ints, most: Ints) -> Ints:
    """Return the least count of 0 to most[i] <= all_of_them[i] with which row i fits; _NEVER where there is none.

    Bisection is valid from 1 to all but one, where more recomputed layers never take more memory. None and all are
    tried separately: with none, no layer is being recomputed; with all, no kept layer covers what recomputing needs.
    """
    fewest = np.full(len(most), _NEVER)
    none = np.zeros_like(most)
    fewest[fits(np.arange(len(most)), none)] = 0
    for high in (np.where(most == all_of_them, most, none), np.minimum(most, all_of_them - 1)):
        rows = np.flatnonzero((fewest == _NEVER) & (high > 0))
        fitting = fits(rows, high[rows])
        fewest[rows[fitting]] = high[rows[fitting]]
    rows = np.flatnonzero((fewest > 1) & (fewest < _NEVER))
    low, high = np.zeros_like(rows), fewest[rows]
    while (apart := high - low > 1).any():
        middle = (low + high)[apart] // 2
        fitting = fits(rows[apart], middle)
        high[apart] = np.where(fitting, middle, high[apart])
        low[apart] = np.where(fitting, low[apart], middle)
    fewest[rows] = high
    return fewest
