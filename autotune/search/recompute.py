"""How many layers of each kind a stage recomputes so that it fits the memory, for many stages at once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from autotune.predict.costs import Array
from autotune.predict.parts import Parts
from autotune.search.holdings import Holdings
from trials.data.sample import Ints

Bools: TypeAlias = NDArray[np.bool_]
Fits: TypeAlias = Callable[[Parts], Bools]
"""Which of some parts fit the memory, as one and the same stage."""

_NEVER = 1 << 30
"""More layers than any stage has."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSeconds:
    """Of the mean pack, by kind of layer in the order of KINDS."""

    kept: Array
    """Forward and backward."""
    recomputed: Array
    """What recomputing the layer adds."""

    def of(self, parts: Parts) -> Array:
        """Of each stage, [stages]."""
        seconds: Array = parts.layers @ self.kept + parts.recomputed @ self.recomputed
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recomputes:
    """Counts of recomputed layers with which holdings fit, all [rows]; a holding has any number of rows."""

    holding: Ints
    """Row of the holdings, ascending."""
    vision: Ints
    language: Ints
    seconds: Array
    """Of the stage."""

    def each(self, holdings: Ints) -> tuple[Ints, Ints]:
        """For each row of some holdings, one after the other: its place among `holdings`, and the row here."""
        first, behind = (np.searchsorted(self.holding, holdings, side) for side in ("left", "right"))
        counts = behind - first
        places = np.repeat(np.arange(len(holdings)), counts)
        within = np.arange(len(places)) - (np.cumsum(counts) - counts)[places]
        return places, first[places] + within


def least_recomputes(holdings: Holdings, fits: Fits, seconds: LayerSeconds, bounds: Array) -> Recomputes:
    """Every pair of counts that fits, within the holding's bound in seconds, of which neither can be lowered.

    One pair at most for each number of vision layers: with the fewest language layers that fit. The least time is among
    them, whatever the two kinds cost, and so is what may be better on packs other than the mean.
    """
    holding = np.repeat(np.arange(len(holdings)), holdings.vision + 1)
    vision = np.arange(len(holding)) - (np.cumsum(holdings.vision + 1) - holdings.vision - 1)[holding]

    def times(holding: Ints, vision: Ints, language: Ints) -> Array:
        return seconds.of(holdings[holding].parts(vision, language))

    rows = np.flatnonzero(times(holding, vision, np.zeros_like(vision)) <= bounds[holding])
    holding, vision = holding[rows], vision[rows]
    tried = holdings[holding]
    language = _fewest(lambda rows, count: fits(tried[rows].parts(vision[rows], count)), tried.language)
    rows = np.flatnonzero(_lower_than_before(holding, language))
    holding, vision, language = holding[rows], vision[rows], language[rows]
    taken = times(holding, vision, language)
    rows = np.flatnonzero(taken <= bounds[holding])
    return Recomputes(holding=holding[rows], vision=vision[rows], language=language[rows], seconds=taken[rows])


def _fewest(fits: Callable[[Ints, Ints], Bools], most: Ints) -> Ints:
    """The least count of 0 to most[i] with which row i fits; _NEVER where there is none.

    By bisection: from 1 to all but one, more recomputed layers never take more memory. None and all are tried apart:
    with none, nothing is being recomputed; with all, no layer that is kept hides what recomputing asks for.
    """
    fewest = np.full(len(most), _NEVER)
    rows = np.arange(len(most))
    fewest[fits(rows, np.zeros_like(rows))] = 0
    for less in (0, 1):
        rows = np.flatnonzero((fewest == _NEVER) & (most > less))
        high = most[rows] - less
        fitting = fits(rows, high)
        fewest[rows[fitting]] = high[fitting]
    rows = np.flatnonzero((fewest > 1) & (fewest < _NEVER))
    low, high = np.zeros_like(rows), fewest[rows]
    while (apart := high - low > 1).any():
        middle = (low + high)[apart] // 2
        fitting = fits(rows[apart], middle)
        high[apart] = np.where(fitting, middle, high[apart])
        low[apart] = np.where(fitting, low[apart], middle)
    fewest[rows] = high
    return fewest


def _lower_than_before(group: Ints, values: Ints) -> Bools:
    """Whether each value is below all before it in its group; groups ascend, and _NEVER is not below anything."""
    # Each group lies below all of those before it, so that the running minimum begins anew.
    lowered = values - group * (2 * _NEVER)
    before = np.minimum.accumulate(np.append(2 * _NEVER, lowered))[:-1]
    return (lowered < before) & (values < _NEVER)
