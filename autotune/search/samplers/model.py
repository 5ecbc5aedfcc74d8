"""Our own: expected improvement for each second of a trial, from predictions that trials correct."""

from typing import Any

from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState
from typing_extensions import override

from autotune.search.sampling.advisor import Advisor
from autotune.search.sampling.context import Distributions, Guide, PointSampler
from trials.plan import Plan


def sampler(guide: Guide) -> BaseSampler:
    return _Model(guide.advisor)


class _Model(PointSampler):
    """Several trials may be open at once: each is taken to come out as it is expected to."""

    def __init__(self, advisor: Advisor) -> None:
        super().__init__(advisor.space)
        self._advisor = advisor

    @override
    def sample_relative(self, study: Study, trial: FrozenTrial, search_space: Distributions) -> dict[str, Any]:
        proposal = self._advisor.propose(self._pending(study, trial))
        point = self.space.point(proposal.plan if proposal else self.space.starts[0])
        assert point is not None  # both are plans of the space
        return point

    def _pending(self, study: Study, trial: FrozenTrial) -> list[Plan]:
        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        return [
            self.space.plan(other.params)
            for other in running
            if other.number != trial.number and self.space.distributions.keys() <= other.params.keys()
        ]
