"""Ends trials that are clearly worse, on steps that are paired with their own predictions."""

import math
import statistics

from optuna.pruners import BasePruner
from optuna.study import Study
from optuna.trial import FrozenTrial
from typing_extensions import override

TO_BEAT = "to_beat_seconds"
"""What the best plan would take now: what earlier trials told the study may be from when the machine was faster."""
_LEAST_STEPS = 2
_CLEARLY = 3.0
"""Standard errors by which a trial has to be worse."""
_LEAST_ERROR = 0.03
"""Of the mean of two steps and more, as a share: few steps may agree by chance."""


class ClearlyWorse(BasePruner):
    """Each intermediate value is an estimate of the final one, by one step over its prediction.

    So steps of different plans, which hold other packs, can be compared. A trial ends when their mean is above what it
    has to beat, the attribute TO_BEAT, by more than its error allows; one without it runs on.
    """

    @override
    def prune(self, study: Study, trial: FrozenTrial) -> bool:
        estimates, to_beat = list(trial.intermediate_values.values()), trial.user_attrs.get(TO_BEAT)
        if to_beat is None or len(estimates) < _LEAST_STEPS:
            return False
        mean = statistics.fmean(estimates)
        error = max(statistics.stdev(estimates) / math.sqrt(len(estimates)), _LEAST_ERROR * mean)
        return bool(mean - _CLEARLY * error > to_beat)
