"""Choice of the steps of an epoch that a trial runs."""

import numpy as np

from autotune.prediction.predictor import Prediction
from trials.tasks.request import Trial


def trial_steps(prediction: Prediction, warmup_steps: int, timed_steps: int) -> Trial:
    """Return the costliest steps as warm-up, and typical steps to time, which are near the means of cost and samples.

    A plan that cannot fit fails in its first step. Timed steps near the means need little correction to represent the
    epoch. The prediction must be uncorrected, so that a plan's steps are always the same.
    """
    # Stable sorts give every machine the same steps.
    costliest = np.argsort(-prediction.step_seconds, kind="stable")[:warmup_steps]
    nearest = np.argsort(prediction.step_distances, kind="stable")
    chosen = [int(step) for step in nearest if step not in costliest][:timed_steps]
    return Trial(
        warmup_steps=tuple(int(step) for step in costliest), timed_steps=tuple(sorted(chosen or nearest[:1].tolist()))
    )
