"""Ends trials that are clearly worse, on steps that are paired with their own predictions."""

import math
import statistics

from optuna.pruners import BasePruner
from optuna.study import Study
from optuna.trial import FrozenTrial, TrialState

_LEAST_STEPS = 2
_CLEARLY = 3.0
"""Standard errors by which a trial has to be worse."""
_LEAST_ERROR = 0.03
"""Of the mean of two steps and more, as a share: few steps may agree by chance."""


class ClearlyWorse(BasePruner):
    """Each intermediate value is an estimate of the final one, by one step over its prediction.

    So steps of different plans, which hold other packs, can be compared. A trial ends when their mean is above the best
    final value by more than its error allows.
    """

    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        estimates = list(trial.intermediate_values.values())
        if len(estimates) < _LEAST_STEPS:
            return False
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        feasible = [other.value for other in done if other.value is not None and _is_feasible(other)]
        mean = statistics.fmean(estimates)
        error = max(statistics.stdev(estimates) / math.sqrt(len(estimates)), _LEAST_ERROR * mean)
        return bool(feasible) and mean - _CLEARLY * error > min(feasible)


def _is_feasible(trial: FrozenTrial) -> bool:
    return all(violation <= 0 for violation in trial.constraints.values())
