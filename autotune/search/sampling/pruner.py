"""A pruner for trials that are clearly worse, by steps that are paired with their own predictions."""

import math
import statistics

from optuna.pruners import BasePruner
from optuna.study import Study
from optuna.trial import FrozenTrial
from typing_extensions import override

TO_BEAT = "to_beat_seconds"
"""Attribute with what the best plan would take now: the values in the study may be from when the machine was faster."""
_LEAST_STEPS = 2
_CLEARLY = 3.0
"""Standard errors by which a trial has to be worse."""
_LEAST_ERROR = 0.03
"""Least standard error of the mean, as a share, since few steps may agree by chance."""


class ClearlyWorse(BasePruner):
    """Pruner of trials whose intermediate values have a mean above the attribute TO_BEAT by 3 standard errors.

    Each intermediate value is an estimate of the final one, from the ratio of one step to its prediction, so steps of
    plans with other packs can be compared. A trial without the attribute is not pruned.
    """

    @override
    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        estimates, to_beat = list(trial.intermediate_values.values()), trial.user_attrs.get(TO_BEAT)
        if to_beat is None or len(estimates) < _LEAST_STEPS:
            return False
        mean = statistics.fmean(estimates)
        error = max(statistics.stdev(estimates) / math.sqrt(len(estimates)), _LEAST_ERROR * mean)
        return bool(mean - _CLEARLY * error > to_beat)
