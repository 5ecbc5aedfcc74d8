"""The solver's plan of every layout and pair of capacities, and then the neighbours of each."""

from collections.abc import Iterator
from typing import Any

from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial
from typing_extensions import override

from autotune.search.guide import Distributions, Guide, PointSampler
from autotune.search.space import Space
from trials.plan import Plan


def sampler(guide: Guide) -> BaseSampler:
    return _Exhaustive(guide.space)


class _Exhaustive(PointSampler):
    """In the order of the axes; from the beginning again when all was suggested."""

    def __init__(self, space: Space) -> None:
        super().__init__(space)
        self._plans = _all_plans(space)

    @override
    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Distributions) -> dict[str, Any]:
        while True:
            plan = next(self._plans, None)
            if plan is None:
                self._plans = _all_plans(self.space)
                continue
            if (point := self.space.point(plan)) is not None:
                return point


def _all_plans(space: Space) -> Iterator[Plan]:
    yield from space.starts
    for start in space.starts:
        yield from space.neighbours(start)
