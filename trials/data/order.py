"""The samples of an epoch, in their order."""

import numpy as np

from trials.arrays import Ints
from trials.data.index import DatasetIndex
from trials.sampling import rounded_up


def epoch_order(index: DatasetIndex, seed: int, epoch: int) -> Ints:
    """Return rows of the index in the epoch's random order, each as often as its repeat says.

    Repeat 1.3 of a file shows each of its samples once, and 30 % of them, rounded up and chosen by `seed` alone, once
    more.
    """
    times = np.concatenate([_times(index, number, seed) for number in range(len(index.files))])
    shown = np.repeat(np.arange(len(index), dtype=np.int64), times)
    return np.random.default_rng([seed, epoch]).permutation(shown)


def _times(index: DatasetIndex, file: int, seed: int) -> Ints:
    """Return how often each sample of the file is shown, [samples of the file]."""
    samples = int(np.count_nonzero(index.file == file))
    repeat = index.files[file].repeat
    times = np.full(samples, int(repeat), dtype=np.int64)
    more = rounded_up(repeat, samples) - int(repeat) * samples
    # Without the epoch in the seed: every epoch repeats the same samples.
    times[np.random.default_rng([seed, file, 1]).permutation(samples)[:more]] += 1
    return times
