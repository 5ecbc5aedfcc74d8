"""Comparison of plans of one packing and layout on a sample of the steps of their epoch."""

from collections.abc import Sequence

import numpy as np

from autotune.prediction.chosen_steps import ChosenSteps
from autotune.prediction.predictor import Predictor
from trials.arrays import Floats
from trials.plan import Plan

# A choice: the mean of 64 steps that differ by 10 % is known to 1.3 %.
MOST_STEPS = 64
"""Steps that represent a longer epoch."""
_ERRORS = 2
"""Standard errors that are added to a difference."""


def cautious_seconds(predictor: Predictor, plans: Sequence[Plan]) -> Floats:
    """Return cautious epoch seconds of plans that share packing and layout, [plans].

    They equal those of `Predictor.predict` for an epoch of at most MOST_STEPS steps. For a longer epoch, MOST_STEPS
    evenly spread steps are simulated, and a plan's difference from the first plan is raised by twice its sampling error
    (standard error of a mean of paired differences, drawn without replacement; Cochran, Sampling Techniques, 2.5).
    """
    # Paired differences vary much less between steps than the seconds themselves.
    whole = predictor.sizes(plans[0].packing, plans[0].layout)
    if whole.epoch.steps <= MOST_STEPS:
        return np.array(predictor.plans_epoch_seconds(plans))
    steps = _spread(whole.epoch.steps)
    seconds = predictor.plans_step_seconds(plans, ChosenSteps(whole, steps))
    count, more = len(steps), seconds - seconds[0]
    errors = more.std(axis=1) * np.sqrt((1 - count / whole.epoch.steps) / max(count - 1, 1))
    cautious: Floats = whole.epoch.steps * (seconds[0].mean() + more.mean(axis=1) + _ERRORS * errors)
    return cautious


def _spread(count: int) -> list[int]:
    """Return steps in the middle of equal shares of the epoch."""
    return [int((number + 0.5) * count / MOST_STEPS) for number in range(MOST_STEPS)]
