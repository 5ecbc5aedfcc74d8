"""Excerpt of an epoch: samples that stand for all of them where many plans are compared."""

import math
from dataclasses import dataclass

import numpy as np

from trials.data.epoch import EpochSettings
from trials.data.index import DatasetIndex
from trials.data.order import epoch_order

# A choice: on six simulated workloads the plan tried first was the same as on whole epochs but for one, predicted 0.9 %
# slower.
_SAMPLES = 8192
"""An excerpt has at least this number of samples, and those of a step."""
# With it, predictions for HBP's mixture of lengths were off by 0.2 to 1 %; with 8192 samples by 4 to 7 %.
_MOST_SAMPLES = 65536
"""The most for few long samples."""
_ERROR = 0.02
"""Standard error of the mean cost of a sample: with few of many long samples, other plans seem to be fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """Samples of the first epoch of a training, each of them once; all of its samples where these are few."""

    index: DatasetIndex
    share: float
    """Their share of the epoch's time."""

    @classmethod
    def of(cls, index: DatasetIndex, settings: EpochSettings) -> "Excerpt":
        """Draw the samples with the seed of the training. The longest sample and the one of most units are among them.

        So the heaviest pack is in the excerpt, unless it is made up of several samples. The share is that of the costs
        of the samples, which is surer than that of their number (ratio estimator; Cochran, Sampling Techniques, 6.2).
        """
        shown = epoch_order(index, settings.seed, 0)
        weights, units, tokens = settings.weights, index.vision_units, index.text_tokens.astype(np.float64)
        cost = weights.unit * units + weights.token * tokens + weights.square * tokens**2
        cost += weights.target * index.target_tokens
        # The standard error of a mean falls with the root of the number of samples.
        enough = math.ceil((cost[shown].std() / cost[shown].mean() / _ERROR) ** 2)
        count = max(_SAMPLES, settings.global_batch_samples, min(enough, _MOST_SAMPLES))
        if count >= len(shown):
            return cls(index=index, share=1.0)
        longest = [int(np.argmax(sizes[shown])) for sizes in (tokens, units)]
        # The order of the epoch is random, so its beginning is a random draw.
        rows = np.sort(shown[np.union1d(np.arange(count), longest)])
        return cls(index=index.keep(rows).each_once, share=float(cost[rows].sum() / cost[shown].sum()))
