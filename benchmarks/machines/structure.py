"""Errors that no formula of a kernel gives: one that similar plans share, and one of each plan's own."""

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.machines.dials import Dials
from trials.plan import Packed, Packing, Padded, Plan

_SHARED_WIDTH, _OWN_WIDTH = 0.02, 0.002
"""Standard deviations at dial 1, as shares of the time."""
_WEIGHTS = {"layout": 0.5, "capacities": 0.6, "split": 0.55, "packer": 0.3}
"""Parts of the shared error; their squares sum to 1, about."""
_WAVES = 8
_CAPACITY_SCALE = 0.7
"""Change of the logarithm of a capacity after which the error is another."""
_SPLIT_SCALE = 0.08
"""Change of a boundary, as a share of the layers, after which the error is another."""


class Structure:
    """Factors by which the passes of plans take longer, the same for the same seed and plan."""

    def __init__(self, seed: int, dials: Dials) -> None:
        self._seed, self._dials = seed, dials

    def factor(self, plan: Plan) -> float:
        shared = sum(weight * self._part(name, plan) for name, weight in _WEIGHTS.items())
        return math.exp(_SHARED_WIDTH * self._dials.structure * shared) * self.own_factor(plan)

    def own_factor(self, plan: Plan) -> float:
        """Return the part that is the plan's own."""
        own = np.random.default_rng([self._seed, 5, int(plan.id, 16)]).standard_normal()
        return math.exp(_OWN_WIDTH * self._dials.own * own)

    def _part(self, name: str, plan: Plan) -> float:
        """Return one part, standard normal over machines."""
        layout, packing = plan.layout, plan.packing
        number = list(_WEIGHTS).index(name)
        match name:
            case "layout":
                return float(np.random.default_rng([self._seed, 4, number, layout.pipeline]).standard_normal())
            case "packer":
                packer = packing.packer if isinstance(packing, Packed) else packing.kind
                return float(np.random.default_rng([self._seed, 4, number, *packer.encode()]).standard_normal())
            case "capacities":
                return self._smooth(_capacities(packing), _CAPACITY_SCALE, number)
            case _:
                layers = plan.boundaries[-1]
                inner = [end / layers for end in plan.boundaries[:-1]]
                return self._smooth(inner, _SPLIT_SCALE, number)

    def _smooth(self, values: Sequence[float], scale: float, number: int) -> float:
        """Return a random function of the values with a squared exponential covariance (Rahimi, Recht 2007)."""
        random = np.random.default_rng([self._seed, 4, number, len(values)])
        frequencies = random.standard_normal((_WAVES, len(values))) / scale
        phases = random.uniform(0, 2 * math.pi, _WAVES)
        amplitudes = random.standard_normal(_WAVES)
        waves = math.sqrt(2 / _WAVES) * np.cos(frequencies @ np.array(values, dtype=np.float64) + phases)
        return float(amplitudes @ waves)


def _capacities(packing: Packing) -> tuple[float, float]:
    if isinstance(packing, Packed):
        return math.log(packing.qv + 1), math.log(packing.qt)
    assert isinstance(packing, Padded)  # no plan of the space has levels
    return math.log(packing.samples), 0.0
