"""Expected improvement per second of a trial, from predictions that trials correct."""

from typing import Any

from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from typing_extensions import override

from autotune.search.sampling.advisor import Advisor
from autotune.search.sampling.context import Distributions, PointSampler, SamplerContext


def sampler(context: SamplerContext) -> BaseSampler:
    return _Model(context.advisor)


class _Model(PointSampler):
    """Sampler of the advisor's proposals; trials that are still open are taken to come out as expected."""

    def __init__(self, advisor: Advisor) -> None:
        super().__init__(advisor.space)
        self._advisor = advisor

    @override
    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Distributions) -> dict[str, Any]:
        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        pending = (
            self.space.plan(other.params)
            for other in running
            if other.number != trial.number and self.space.distributions.keys() <= other.params.keys()
        )
        proposal = self._advisor.propose(pending)
        point = self.space.point(proposal.plan if proposal else self.space.starts[0])
        assert point is not None  # both are plans of the space
        return point
