"""Non-negative least squares that is robust to a few wrong measurements."""

from itertools import combinations

import numpy as np

from trials.arrays import Floats
from trials.costs.coefficients import Coefficients

# A choice: each round solves for three coefficients at most; fewer might end before the weights settle.
_ROUNDS = 15
"""Most re-weightings."""
_SMALLEST = 1e-3
"""Least scale, as a share of the largest: relative errors of tiny values mean nothing."""
# Relative error below which rows are solved exactly, far above rounding in float64 (1e-16) and below any timer's.
_EXACT = 1e-9
# Above the rounding of the normal equations in float64, and too small to move a coefficient that the sizes decide.
_RIDGE = 1e-12
# A choice: outliers hardly move what other rows decide, and still decide what no other row does. Of six packs, four may
# have samples of one length, so that only the other two tell the cost of tokens from that of their squares.
_LEAST_WEIGHT = 1e-3
_BISQUARE = 4.685
"""Tukey's constant: 95 % of the efficiency of least squares under normal errors."""


def fit_not_negative(sizes: Floats, values: Floats, terms: tuple[int, ...]) -> Coefficients:
    """Return coefficients of the four columns of `sizes` [n, 4]; those outside `terms` are 0.

    Relative errors have equal weights. The fit starts with least absolute errors (iteratively re-weighted) and goes on
    with Tukey's bisquare weights (Huber, Ronchetti: Robust Statistics, section 7.8), with which a measurement that is
    far from the others hardly counts.
    """
    rows = sizes[:, list(terms)]
    found = _relative_fit(rows, values, values)
    # Again as shares of what was fitted: a value that is far too small has too much weight as a share of itself.
    found = _relative_fit(rows, values, rows @ found)
    coefficients = np.zeros(4)
    coefficients[list(terms)] = found
    units, tokens, squares, constant = coefficients.tolist()
    return units, tokens, squares, constant


def _relative_fit(rows: Floats, values: Floats, scale: Floats) -> Floats:
    """Fit robustly with errors as shares of `scale` [n]."""
    # 1 where all values are 0, as those of layers that take no time or bytes.
    scale = np.maximum(scale, scale.max() * _SMALLEST or 1.0)
    rows, target = rows / scale[:, None], values / scale
    found = _solve(rows, target, np.ones(len(target)))
    for _ in range(_ROUNDS):
        errors = np.abs(target - rows @ found)
        if errors.max() < _EXACT:
            return found
        before, found = found, _solve(rows, target, 1 / np.maximum(errors, 1e-6))
        if np.allclose(found, before, rtol=1e-3, atol=0):
            break
    # Bisquare weights of outliers are least. Their loss has local minima, so it starts from the least absolute errors.
    for _ in range(3):
        errors = np.abs(target - rows @ found)
        # 1.4826 median absolute errors are the standard deviation of normal errors.
        width = _BISQUARE * 1.4826 * float(np.median(errors))
        if width < _EXACT:
            break
        found = _solve(rows, target, np.maximum(np.clip(1 - (errors / width) ** 2, 0, None) ** 2, _LEAST_WEIGHT))
    return found


def _solve(rows: Floats, target: Floats, weights: Floats) -> Floats:
    """Return the non-negative solution of weighted least squares, by trying every choice of the few columns."""
    norms = np.sqrt((rows**2 * weights[:, None]).sum(axis=0))
    scaled = rows / np.where(norms > 0, norms, 1.0)
    # A trace of a ridge: sizes that cannot be separated share their cost.
    gram = (scaled * weights[:, None]).T @ scaled + _RIDGE * np.eye(len(norms))
    right = (scaled * weights[:, None]).T @ target
    best, best_gain = np.zeros(len(right)), 0.0
    for count in range(len(right), 0, -1):
        for chosen in combinations(range(len(right)), count):
            part = np.linalg.solve(gram[np.ix_(chosen, chosen)], right[list(chosen)])
            gain = float(part @ right[list(chosen)])
            if (part >= 0).all() and gain > best_gain:
                best, best_gain = np.zeros(len(right)), gain
                best[list(chosen)] = part
        # The minimum without constraints is not negative, so no choice of fewer columns is better.
        if count == len(right) and best_gain > 0:
            break
    return best / np.where(norms > 0, norms, 1.0)
