"""The solver's plan of every layout and pair of capacities, and then the neighbours of each."""

from itertools import chain
from typing import Any

from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial
from typing_extensions import override

from autotune.search.sampling.context import Distributions, PointSampler, SamplerContext


def sampler(context: SamplerContext) -> BaseSampler:
    return _Exhaustive(context)


class _Exhaustive(PointSampler):
    """Sampler of plans in the order of the axes, without those that were tried; the first one when none is left."""

    def __init__(self, context: SamplerContext) -> None:
        super().__init__(context.space)
        self._advisor = context.advisor
        starts = context.space.starts
        self._plans = chain(starts, chain.from_iterable(map(context.space.neighbours, starts)))

    @override
    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Distributions) -> dict[str, Any]:
        left = (plan for plan in self._plans if plan not in self._advisor.tried)
        points = (self.space.point(plan) for plan in chain(left, self.space.starts))
        return next(point for point in points if point is not None)
