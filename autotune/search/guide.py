"""What a sampler may know of the search that it serves."""

from dataclasses import dataclass
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial
from typing_extensions import override

from autotune.search.advisor import Advisor
from autotune.search.space import Space

Distributions = dict[str, BaseDistribution]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guide:
    """Given to each module of `autotune.search.samplers`, whose `sampler(guide)` makes an Optuna sampler."""

    space: Space
    advisor: Advisor
    seed: int


class PointSampler(BaseSampler):
    """Suggests whole points of a space, each of which is a plan that can be trained."""

    def __init__(self, space: Space) -> None:
        self.space = space

    @override
    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> Distributions:
        return dict(self.space.distributions)

    @override
    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise AssertionError(f"{param_name} is no parameter of the space")


class Nearest(PointSampler):
    """A sampler that knows no plans: its suggestions near the solver's plans, each moved to the nearest valid one."""

    def __init__(self, sampler: BaseSampler, space: Space) -> None:
        super().__init__(space)
        self._sampler = sampler

    @override
    def reseed_rng(self) -> None:
        self._sampler.reseed_rng()

    @override
    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Distributions) -> dict[str, Any]:
        wanted = self._sampler.infer_relative_search_space(study, trial)
        near = self.space.near
        point = self._sampler.sample_relative(study, trial, {name: near[name] for name in wanted if name in near})
        for name, values in near.items():
            if name not in point:
                point[name] = self._sampler.sample_independent(study, trial, name, values)
        found = self.space.point(self.space.plan(point))
        assert found is not None  # a plan of the space
        return found

    @override
    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._sampler.before_trial(study, trial)

    @override
    def after_trial(self, study: Study, trial: FrozenTrial, state: Any, values: Any) -> None:
        self._sampler.after_trial(study, trial, state, values)
