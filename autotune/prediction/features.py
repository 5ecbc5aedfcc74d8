"""Features of a calibration: predicted seconds by the cost that they grow with."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TypeAlias

import numpy as np

from autotune.prediction.chosen_steps import ChosenSteps
from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.prediction.updates import scaled_updates
from trials.arrays import Floats
from trials.costs.coefficients import Coefficients, LayerKind, times
from trials.costs.layer import LayerCost
from trials.costs.layer_costs import LayerCosts, LinkCost, LoadCost
from trials.plan import Plan

COSTS = ("vision", "language", "head", "recompute", "pack", "loading", "communication", "update")
"""Layers by kind, recomputation (or copies to the host in its place), the constant of each layer per pack, loading,
all that ranks send each other, the optimizer of a single rank."""
LAYER_COSTS = COSTS[:4]
"""Costs that the best split depends on."""
FEATURES = (*COSTS, "schedule")
"""COSTS, and the time of a step beyond its simulated schedule."""
Features: TypeAlias = tuple[float, ...]
"""Seconds for each of FEATURES."""

# Place of the factor of each kind in COSTS. Patch embedding and projector run per vision unit, as vision layers do.
_SIZED: dict[LayerKind, int] = {"vision_embedding": 0, "vision": 0, "projector": 0, "language": 1, "head": 2}
_RECOMPUTE, _PACK, _LOADING, _COMMUNICATION, _UPDATE = range(3, 8)
_SMALL = 0.02
"""Change of a factor for a derivative: large enough for the slowest stage to change for some packs."""
_REMEMBERED = 64
"""Scaled costs that are cached: derivatives of all plans are taken at few factors."""


def scaled(costs: LayerCosts, factors: Sequence[float] | Floats) -> LayerCosts:
    """Return the costs times one factor for each of COSTS."""
    return _scaled(costs, tuple(map(float, factors)))


@lru_cache(_REMEMBERED)
def _scaled(costs: LayerCosts, factors: tuple[float, ...]) -> LayerCosts:
    def layer(kind: LayerKind, cost: LayerCost) -> LayerCost:
        def sized(coefficients: Coefficients) -> Coefficients:
            units, tokens, squares, constant = coefficients
            factor = factors[_SIZED[kind]]
            return units * factor, tokens * factor, squares * factor, constant * factors[_PACK]

        return replace(
            cost,
            forward_seconds=sized(cost.forward_seconds),
            backward_seconds=sized(cost.backward_seconds),
            weight_seconds=sized(cost.weight_seconds),
            deferral_seconds=sized(cost.deferral_seconds),
            recompute_seconds=times(cost.recompute_seconds, factors[_RECOMPUTE]),
            selective_seconds=times(cost.selective_seconds, factors[_RECOMPUTE]),
        )

    def link(cost: LinkCost) -> LinkCost:
        return replace(
            cost,
            latency_seconds=cost.latency_seconds * factors[_COMMUNICATION],
            seconds_per_byte=cost.seconds_per_byte * factors[_COMMUNICATION],
        )

    return replace(
        costs,
        layers=tuple((kind, layer(kind, cost)) for kind, cost in costs.layers),
        loading=LoadCost(
            pixels_seconds=times(costs.loading.pixels_seconds, factors[_LOADING]),
            labels_seconds=times(costs.loading.labels_seconds, factors[_LOADING]),
        ),
        link=link(costs.link),
        updates=scaled_updates(costs, factors[_UPDATE], factors[_COMMUNICATION]),
        communications=tuple(
            replace(
                cost,
                link=link(cost.link),
                between=cost.between and link(cost.between),
            )
            for cost in costs.communications
        ),
        exchanges=tuple(
            each.times(factors[_RECOMPUTE if each.name == "copy" else _COMMUNICATION]) for each in costs.exchanges
        ),
    )


def step_features(predictor: Predictor, plan: Plan, steps: Sequence[int], factors: Sequence[float]) -> Features:
    """Return the derivatives of the mean seconds of these steps by each factor, then the seconds themselves.

    The time of a step is the longest path through its passes, a convex and homogeneous function of the factors, so the
    derivatives times the factors sum to it (Euler).
    """
    seconds, parts = _derivatives(predictor, factors, lambda at: at.step_seconds(plan, steps).mean(keepdims=True))
    return (*parts[:, 0].tolist(), float(seconds[0]))


def stage_features(
    predictor: Predictor, plan: Plan, steps: Sequence[int], factors: Sequence[float], *, stage: int, data_rank: int
) -> tuple[Features, Features, Features, Features]:
    """Return the features of a rank's (load, forward, backward, optimizer) seconds in a mean step of these.

    They are derivatives as in `step_features`: passes wait for copies, and hide averages, by differences of times.
    Passes include exchanges with ranks that share a pack.
    """
    sizes = ChosenSteps(predictor.sizes(plan.packing, plan.layout), steps)
    packs = np.concatenate([block[:, :, data_rank].ravel() for block in sizes.blocks])

    def seconds(at: Predictor) -> Floats:
        of_packs = at.times.plan_seconds(plan, sizes)
        sides = (of_packs.load, of_packs.forward + of_packs.exchange, of_packs.shared_backward)
        update = at.times.update_parts(plan.layout, Parts.of_levels(plan)[0], sizes).seconds
        return np.array([*(side[packs, stage].sum() / len(steps) for side in sides), update[stage]])

    _, parts = _derivatives(predictor, factors, seconds)
    load, forward, backward, update = ((*of_time, 0.0) for of_time in parts.T.tolist())
    return load, forward, backward, update


def _derivatives(
    predictor: Predictor, factors: Sequence[float], seconds_of: Callable[[Predictor], Floats]
) -> tuple[Floats, Floats]:
    """Return (some times at these factors [times], their derivatives by each factor [COSTS, times])."""
    around = np.array(factors)

    def seconds(at: Floats) -> Floats:
        return seconds_of(predictor.with_costs(scaled(predictor.costs, at)))

    base = seconds(around)
    # Finite differences do not sum to the times exactly, so they are scaled to do so.
    grown = np.array([seconds(around + _SMALL * one) for one in np.eye(len(COSTS))])
    parts = np.maximum(grown - base, 0) / _SMALL
    parts *= base / np.maximum(around @ parts, 1e-12)
    return base, parts
