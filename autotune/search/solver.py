"""The split and the recompute counts with the least predicted time that fit the memory, for a packing and a layout."""

from collections.abc import Callable

import numpy as np

from autotune.predict.costs import Array
from autotune.predict.predictor import Predictor
from autotune.search.holdings import Holdings
from autotune.search.limits import Limits
from autotune.search.problem import Problem
from autotune.search.splits import Choices, min_max_split
from trials.plan import Layout, Packing, Plan


class Solver:
    """Exact for the closed form of `splits` on the mean pack; the memory is that of the heaviest packs.

    Every method raises InvalidPlan when the layout has more stages than the model has layers, or its steps no packs.
    """

    def __init__(self, predictor: Predictor, limits: Limits) -> None:
        self._predictor = predictor
        self._limits = limits

    def solve(self, packing: Packing, layout: Layout) -> Plan | None:
        """The plan of least time by the closed form; None when no split fits."""
        return next(iter(self._problem(packing, layout).best(1)), None)

    def solutions(self, packing: Packing, layout: Layout, count: int) -> tuple[Plan, ...]:
        """The `count` plans of least time by the closed form, that of the fastest epoch of real packs first.

        None of their stages could recompute fewer layers of a kind. Fewer plans when no more fit.
        """
        plans = self._problem(packing, layout).best(count)
        return tuple(sorted(plans, key=lambda plan: self._predictor.predict(plan).epoch_seconds))

    def fit(self, packing: Packing, layout: Layout, ends: tuple[int, ...]) -> Plan | None:
        """The plan whose stages end after so many layers of the chain, with the least time for recomputation.

        None when a stage does not fit.
        """
        return self._problem(packing, layout).fit(ends)

    def fit_fewest(self, packing: Packing, layout: Layout, ends: tuple[int, ...]) -> Plan | None:
        """The plan whose stages end so, with the fewest recomputed layers that fit, vision layers first.

        None when a stage does not fit. What recomputing a layer of each kind costs is not weighed: the baselines do so.
        """
        return self._problem(packing, layout).fit_fewest(ends)

    def forward_ends(self, packing: Packing, layout: Layout) -> tuple[int, ...]:
        """Where the stages end when the slowest stage's forward time on the mean pack is least, memory aside."""
        problem = self._problem(packing, layout)

        def seconds(_: int, held: Holdings) -> Array:
            nothing = np.zeros_like(held.vision)
            forward, _backward = self._predictor.pass_seconds(held.parts(nothing, nothing), problem.sizes.mean)
            of_mean: Array = forward[0]
            return of_mean

        return self._min_max(problem, layout, seconds)[0]

    def least_bytes(self, packing: Packing, layout: Layout) -> float:
        """What the fullest stage needs under the leanest split, with everything recomputed."""
        problem = self._problem(packing, layout)

        def needed(number: int, held: Holdings) -> Array:
            return problem.stage_bytes(number, held.parts(held.vision, held.language))

        return self._min_max(problem, layout, needed)[1]

    def _min_max(
        self, problem: Problem, layout: Layout, function: Callable[[int, Holdings], Array]
    ) -> tuple[tuple[int, ...], float]:
        """The split whose largest value over stages is least: its ends, and that value."""
        stages = []
        for number in range(layout.pipeline):
            starts, ends = problem.cuts(number)
            held, _, which = problem.holdings(number, starts, ends).distinct()
            stages.append(Choices(starts=starts, ends=ends, seconds=function(number, held)[which]))
        split = min_max_split(stages, self._limits.layers)
        assert split is not None  # no value is infinite
        return tuple(int(choices.ends[row]) for choices, row in zip(stages, split.rows, strict=True)), split.slowest

    def _problem(self, packing: Packing, layout: Layout) -> Problem:
        return Problem(self._predictor, self._limits, packing, layout)
