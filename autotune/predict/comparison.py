"""Many plans of one packing and layout side by side, on some steps of their epoch."""

from collections.abc import Sequence

import numpy as np

from autotune.predict.chosen_steps import ChosenSteps
from autotune.predict.costs import Array
from autotune.predict.predictor import Predictor
from trials.plan import Plan

MOST_STEPS = 64
"""So many steps stand for an epoch that has more."""
_ERRORS = 2
"""Standard errors by which a difference may be wrong."""


def cautious_seconds(predictor: Predictor, plans: Sequence[Plan]) -> Array:
    """Seconds of an epoch of plans with one packing and layout, not less than what is sure beside the first plan.

    What `Predictor.predict` says, for an epoch of at most MOST_STEPS steps. Of a longer one, so many steps are
    simulated, spread evenly over it, and a plan's difference from the first plan is raised by its error from that
    (standard error of a mean of paired differences, drawn without replacement; Cochran, Sampling Techniques, 2.5).
    [plans]
    """
    whole = predictor.sizes(plans[0].packing, plans[0].layout)
    steps = _spread(whole.epoch.steps)
    seconds = predictor.plans_step_seconds(plans, ChosenSteps(whole, steps))
    count, more = len(steps), seconds - seconds[0]
    errors = more.std(axis=1) * np.sqrt((1 - count / whole.epoch.steps) / max(count - 1, 1))
    cautious: Array = whole.epoch.steps * (seconds[0].mean() + more.mean(axis=1) + _ERRORS * errors)
    return cautious


def _spread(count: int) -> list[int]:
    """Steps in the middle of equal shares of the epoch; all of them when they are few."""
    few = min(count, MOST_STEPS)
    return [int((number + 0.5) * count / few) for number in range(few)]
