"""The solver's plan of every layout and pair of capacities, and then the neighbours of each."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial
from typing_extensions import override

from autotune.search.sampling.context import Distributions, Guide, PointSampler
from autotune.search.space.space import Space
from trials.plan import Plan


def sampler(guide: Guide) -> BaseSampler:
    return _Exhaustive(guide)


class _Exhaustive(PointSampler):
    """In the order of the axes, but for what was tried; the first one again when nothing is left."""

    def __init__(self, guide: Guide) -> None:
        super().__init__(guide.space)
        self._advisor = guide.advisor
        self._plans = _all_plans(guide.space)

    @override
    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Distributions) -> dict[str, Any]:
        left = (plan for plan in self._plans if not self._advisor.has_tried(plan))
        points = (self.space.point(plan) for plan in chain(left, self.space.starts))
        return next(point for point in points if point is not None)


def _all_plans(space: Space) -> Iterator[Plan]:
    yield from space.starts
    for start in space.starts:
        yield from space.neighbours(start)
