"""Which steps of an epoch a trial runs."""

import numpy as np

from autotune.predict.predictor import Prediction
from trials.job import SearchSection
from trials.tasks.request import Trial


def trial_steps(prediction: Prediction, settings: SearchSection) -> Trial:
    """The costliest step to warm up with, then the most typical ones: near the mean both in cost and in samples.

    What cannot fit fails at once. Little is left to be corrected for, and samples over seconds of the timed steps are
    near those of the epoch. The prediction must be uncorrected, so that a plan's steps are always the same.
    """
    seconds, samples = prediction.step_seconds, prediction.step_samples
    costliest = np.argsort(-seconds, kind="stable")[: settings.warmup_steps]
    distance = np.abs(seconds / seconds.mean() - 1) + np.abs(samples / samples.mean() - 1)
    nearest = np.argsort(distance, kind="stable")
    chosen = [int(step) for step in nearest if step not in costliest][: settings.timed_steps]
    return Trial(
        warmup_steps=tuple(int(step) for step in costliest), timed_steps=tuple(sorted(chosen or nearest[:1].tolist()))
    )
