"""Curves: how much longer a layer takes at a size than its coefficients say.

Times of kernels are not linear in the size of a pack: they come in whole waves of tiles, fall out of caches, and are
bound by launches where packs are small. A curve keeps what a profile measured of this at its sizes.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from autotune.prediction.columns import TARGETS, TOKENS, UNITS
from trials.arrays import Floats
from trials.costs.coefficients import KINDS, LayerKind
from trials.costs.layer_costs import LayerCosts

_SIZE_COLUMN: dict[LayerKind, int] = {
    "vision_embedding": UNITS,
    "vision": UNITS,
    "projector": TOKENS,
    "language": TOKENS,
    "head": TARGETS,
}
"""Column that a curve of each kind depends on."""
Curve: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]
"""Ascending sizes, and the factor at each."""
_ERROR = 0.4
"""Standard error of the median of five normally distributed values, over their interquartile range."""
_BISQUARE = 4.685 * 1.4826
"""Tukey's constant in median absolute errors, as in the fit of the coefficients."""
# A choice: up to e^0.3, or 1.35 times the fitted line, a curve is taken for waves of tiles or for launches.
_USUAL = 0.3
"""Logarithm of a factor that is never taken for a wrong measurement."""


class Curves:
    """Factors of all kinds of layers for packs of any size."""

    def __init__(self, costs: LayerCosts) -> None:
        self._curves = [(column, costs[kind]) for kind, column in _SIZE_COLUMN.items()]

    def at(self, sizes: Floats) -> Floats:
        """Return the factors for packs of these sizes [packs, 5], [packs, kinds]."""
        factors = np.ones((len(sizes), len(KINDS)))
        for number, (column, cost) in enumerate(self._curves):
            if cost.curve:
                factors[:, number] = np.interp(sizes[:, column], cost.curve_sizes, cost.curve)
        return factors


def fit_curve(kind: LayerKind, sizes: Floats, ratios: Floats, spreads: Sequence[float]) -> Curve:
    """Return (sizes, factors) of measured over fitted seconds, given as `ratios` [timings] at `sizes` [timings, 5].

    Each factor is drawn towards 1 by the share of the factors' variance that the noise of the measurements explains
    (James and Stein 1961). `spreads` are interquartile ranges of the repeats as a share of their median. Sizes that
    were timed wrongly, far from the fit and from all others, are left out.
    """
    column, logarithms = sizes[:, _SIZE_COLUMN[kind]], np.log(np.maximum(ratios, np.finfo(float).tiny))
    at = np.unique(column)
    found = np.array([_nearest_half(logarithms[column == size]) for size in at])
    right = np.abs(found) <= max(_USUAL, _BISQUARE * float(np.median(np.abs(found))))
    at, found = at[right], found[right]
    variance, noise = float(np.mean(found**2)), _ERROR * float(np.median(spreads))
    kept = max(0.0, 1 - noise**2 / variance) if variance else 0.0
    return tuple(at.tolist()), tuple(np.exp(kept * found).tolist())


def with_floor(curve: Curve, kind: LayerKind, sizes: Floats, floors: Floats) -> Curve:
    """Return the curve, nowhere below `floors` [timings], which are given at `sizes` [timings, 5]."""
    column = sizes[:, _SIZE_COLUMN[kind]]
    at = np.unique(column)
    least = np.array([np.median(floors[column == size]) for size in at])
    return tuple(at.tolist()), tuple(np.maximum(np.interp(at, *curve), least).tolist())


def _nearest_half(logarithms: Floats) -> float:
    """Return the logarithm of median magnitude among the ranks, since one rank may be wrong."""
    ordered = logarithms[np.argsort(np.abs(logarithms))]
    return float(ordered[(len(ordered) - 1) // 2])
