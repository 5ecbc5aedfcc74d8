"""Choice of the steps of an epoch that a trial runs."""

import numpy as np

from autotune.prediction.predictor import Prediction
from trials.tasks.request import Trial


def trial_steps(prediction: Prediction, warmup_steps: int, timed_steps: int) -> Trial:
    """Return the steps that warm up, and typical steps to time, which are near the means of cost and samples.

    Timed steps near the means need little correction to represent the epoch. The prediction must be uncorrected, so
    that a plan's steps are always the same.
    """
    # Stable sorts give every machine the same steps.
    warmup = warmup_of(prediction, warmup_steps)
    nearest = np.argsort(prediction.step_distances, kind="stable")
    chosen = [int(step) for step in nearest if step not in warmup][:timed_steps]
    return Trial(warmup_steps=warmup, timed_steps=tuple(sorted(chosen or nearest[:1].tolist())))


def spread_steps(prediction: Prediction, warmup_steps: int, timed_steps: int) -> Trial:
    """Return the steps that warm up, and steps to time that are evenly spaced in the order of predicted cost.

    This systematic sample has cheap and costly steps in the proportions of the epoch, so its mean represents the epoch
    even where costs have another form than predicted (Cochran: Sampling Techniques, section 8.1). It needs more steps
    than a sample of typical ones.
    """
    order = np.argsort(prediction.step_seconds, kind="stable")
    count = min(timed_steps, len(order))
    places = ((np.arange(count) + 0.5) * len(order) / count).astype(int)
    warmup = warmup_of(prediction, warmup_steps)
    return Trial(warmup_steps=warmup, timed_steps=tuple(sorted(order[places].tolist())))


def warmup_of(prediction: Prediction, count: int) -> tuple[int, ...]:
    """Return the steps of the epoch that warm up: the one that needs the most memory, then the costliest ones.

    So a plan that does not fit fails in its first step, and the peak of a trial is that of the epoch.
    """
    costliest = np.argsort(-prediction.step_seconds, kind="stable").tolist()
    return tuple(dict.fromkeys((prediction.heaviest_step, *costliest)))[:count]
