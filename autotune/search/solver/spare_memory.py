"""Uses of the memory that a split and its recomputation leave: deferred weight gradients, and weights that stay."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import TypeAlias

import numpy as np

from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from trials.model.cut import Cut, cut
from trials.plan import Layout, Packing, Plan

# A choice: the best plan recomputes nothing for weights, or about as much as all of them or some need.
_SHARES = (1.25, 1.0, 0.75, 0.5, 0.25)
"""Shares of the bytes that all weights need, for which plans recompute more."""
_MostDeferred: TypeAlias = Callable[[Packing, Layout, int, Cut], int | None]


class SpareMemory:
    """Plans that use the memory that is left on their stages, of which the splitting problem knows nothing."""

    def __init__(self, predictor: Predictor, usable_bytes: float) -> None:
        """`usable_bytes` are those that a stage of a solved plan may be expected to need."""
        self._predictor, self._usable = predictor, usable_bytes

    @staticmethod
    def has_use(layout: Layout) -> bool:
        """Return whether stages of the layout may defer weight gradients, or keep weights gathered."""
        return layout.zero_bubble or layout.shards_weights

    def lacking(self, plan: Plan) -> list[float]:
        """Return how many bytes less plans should take that use more memory than this one leaves; the most first.

        With them the fullest stage can defer all weight gradients, or keep all weights or some. Empty where it can.
        """
        whole = plan if plan.layout.zero_bubble else _gathering_once(plan, _layers(plan))
        more = max(self._predictor.plans_bytes([whole])[0]) - self._usable
        if more <= 0:
            return []
        return [more] if plan.layout.zero_bubble else [share * more for share in _SHARES]

    def used(self, plans: Iterable[Plan | None]) -> list[Plan | None]:
        """Let each stage of these plans defer the most packs that fit; None for a plan in which none can defer any.

        With ZeRO 3 let it gather weights once for both passes, of as many layers as fit, where that takes less time.
        """
        given = [plan for plan in plans if plan is not None]
        needed = dict(zip(given, self._predictor.plans_bytes(given), strict=True))
        # Most stages of similar plans are alike.
        most_deferred = cache(self._most_deferred)
        return [plan and self._using(plan, needed[plan], most_deferred) for plan in plans]

    def _using(self, plan: Plan, needed: Sequence[float], most_deferred: _MostDeferred) -> Plan | None:
        if plan.layout.zero_bubble:
            return self._deferring(plan, needed, most_deferred)
        return self._gathering(plan) if plan.layout.shards_weights else plan

    def _gathering(self, plan: Plan) -> Plan:
        options = [_gathering_once(plan, layers) for layers in range(_layers(plan) + 1)]
        needed = [*map(max, self._predictor.plans_bytes(options))]
        most = options[max(0, bisect_right(needed, self._usable) - 1)]
        return most if self._exchange_seconds(most) < self._exchange_seconds(plan) else plan

    def _exchange_seconds(self, plan: Plan) -> float:
        """Return the seconds of exchanges of one stage in both passes of the mean row."""
        times, parts = self._predictor.times, Parts.of_levels(plan)
        of_levels = zip(self._predictor.sizes(plan.packing, plan.layout).of_levels, parts, strict=True)
        return sum(
            sizes.row_share
            * float(np.sum(times.exchange_seconds(part, plan.layout, sizes.mean, np.array([sizes.degree]))))
            for sizes, part in of_levels
        )

    def _deferring(self, plan: Plan, needed: Sequence[float], most_deferred: _MostDeferred) -> Plan | None:
        stages = list(plan.stages)
        for number, (of_stage, part) in enumerate(zip(needed, cut(plan), strict=True)):
            if of_stage > self._usable:
                # Which layers they are does not matter, so that stages of as many are the same one.
                alike = replace(part, vision=range(len(part.vision)), language=range(len(part.language)))
                most = most_deferred(plan.packing, plan.layout, number, alike)
                if most is None:
                    return None
                stages[number] = replace(stages[number], most_deferred=most)
        if all(stage.most_deferred == 0 for stage in stages[1:]):
            return None
        return replace(plan, stages=tuple(stages))

    def _most_deferred(self, packing: Packing, layout: Layout, number: int, stage: Cut) -> int | None:
        """Return the most packs that fit of those that a stage lacks the memory to defer all of; None if none fits."""
        sizes = self._predictor.sizes(packing, layout)
        levels = [Parts.of((stage,), level) for level in range(len(packing.degrees))]

        def lacks_memory(most_deferred: int) -> bool:
            deferring = [replace(each, most_deferred=np.array([most_deferred])) for each in levels]
            (needed,) = self._predictor.memory.expected_of_levels(deferring, layout, np.array([number]), sizes)
            return needed > self._usable

        if lacks_memory(0):
            return None
        # Of 1, 2 and so on, as many as there is memory for.
        return bisect_left(range(1, number), True, key=lacks_memory)


def _layers(plan: Plan) -> int:
    return plan.stages[0].vision + plan.stages[0].language


def _gathering_once(plan: Plan, layers: int) -> Plan:
    """Return the plan with this number as `gathered_once` of its stage; with ZeRO 3 it has one."""
    return replace(plan, stages=(replace(plan.stages[0], gathered_once=layers),))
