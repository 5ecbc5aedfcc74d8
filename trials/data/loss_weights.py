"""Weights of samples in the loss of a step."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from trials.arrays import Floats
from trials.job import LossWeighting

# Sum of a sample's weights, as a power of its targets n: each target has 1, 1 / n or 1 / sqrt(n), as in InternVL.
_POWERS: Mapping[LossWeighting, float] = {"token": 1.0, "sample": 0.0, "square": 0.5}


def sample_weights(targets: NDArray[np.integer], weighting: LossWeighting) -> Floats:
    """Return the weight of each sample by its number of target tokens, [samples]; 0 where it has none.

    The loss of a step is the mean of each sample's mean loss over its targets, with these weights. So a target of a
    sample with n targets has weight 1, 1 / n or 1 / sqrt(n), as InternVL's `loss_reduction` gives it (`len2weight` in
    its internvl_chat_finetune.py).
    """
    return np.where(targets > 0, targets.astype(np.float64) ** _POWERS[weighting], 0.0)


def token_weights(targets: NDArray[np.integer], weighting: LossWeighting) -> Floats:
    """Return the weight of each target token of the samples, [samples]."""
    weights: Floats = sample_weights(targets, weighting) / np.maximum(targets, 1)
    return weights
