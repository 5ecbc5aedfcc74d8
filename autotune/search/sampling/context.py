"""The context that a sampler is given, and base classes of samplers."""

from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import optuna
from optuna.distributions import BaseDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState, create_trial
from typing_extensions import override

from autotune.search.execution.ledger import Ledger
from autotune.search.roles import REPEATS
from autotune.search.sampling.advisor import Advisor
from autotune.search.sampling.attributes import ROLE
from autotune.search.space.space import Space

Distributions = dict[str, BaseDistribution]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerContext:
    """What a sampler may use: the plans of the space, and what the search has learned of them."""

    space: Space
    advisor: Advisor
    seed: int

    @classmethod
    def of_agent(cls, space: Space, advisor: Advisor, ledger: Ledger, seed: int) -> "SamplerContext":
        """Return the context of an agent that comes to the trials of the ledger, in a study with this seed.

        By the seed of the study alone, samplers would suggest again what they did at its beginning.
        """
        return cls(space=space, advisor=advisor, seed=seed + len(ledger.everything()) + len(ledger.open))


class SamplerModule(Protocol):
    """What a module of `autotune.search.samplers` offers."""

    def sampler(self, context: SamplerContext) -> BaseSampler:
        """Return an Optuna sampler that suggests points of `context.space`, the same ones for an equal seed."""


class PointSampler(BaseSampler):
    """Sampler of whole points of a space, each of which is a plan that can be trained."""

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
    """Sampler that moves the suggestions of another one, which knows no plans, to the nearest valid plan.

    The wrapped sampler sees no repeats, and plans of the space alone. If it saw a trial without parameters, as of
    another baseline, Optuna would find no parameter common to all trials, and draw each independently.
    """

    def __init__(self, sampler: BaseSampler, space: Space) -> None:
        super().__init__(space)
        self._sampler = sampler

    @override
    def reseed_rng(self) -> None:
        self._sampler.reseed_rng()

    @override
    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Distributions) -> dict[str, Any]:
        near = self.space.near
        seen = self._seen(study)
        # The sampler looks up the trial that it suggests for, which must be one of the study that it sees.
        seen.add_trial(create_trial(state=TrialState.RUNNING))
        trial = seen.get_trials(deepcopy=False)[-1]
        point = self._sampler.sample_relative(seen, trial, near)
        # Optuna's samplers return no relative values before their startup trials are done.
        for name, values in near.items():
            if name not in point:
                point[name] = self._sampler.sample_independent(seen, trial, name, values)
        found = self.space.point(self.space.plan(point))
        assert found is not None  # a plan of the space
        return found

    def _seen(self, study: Study) -> Study:
        """Return a study of the finished trials that have all parameters, clipped to the near ranges."""
        near = self.space.near
        seen = optuna.create_study(direction=study.direction)
        for trial in study.get_trials(deepcopy=False):
            is_repeat = trial.user_attrs.get(ROLE) in REPEATS
            if trial.state.is_finished() and near.keys() <= trial.params.keys() and not is_repeat:
                moved = copy(trial)
                moved.params = {name: _within(values, trial.params[name]) for name, values in near.items()}
                moved.distributions = near
                seen.add_trial(moved)
        return seen

    @override
    def before_trial(self, study: Study, trial: FrozenTrial) -> None:
        self._sampler.before_trial(study, trial)

    @override
    def after_trial(self, study: Study, trial: FrozenTrial, state: Any, values: Any) -> None:
        self._sampler.after_trial(study, trial, state, values)


def _within(values: BaseDistribution, value: Any) -> Any:
    return min(max(value, values.low), values.high) if isinstance(values, IntDistribution) else value
