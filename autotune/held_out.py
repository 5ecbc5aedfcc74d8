"""Samples that are held out of a training, to evaluate the model on them."""

import math
from decimal import Decimal

import numpy as np

from trials.arrays import Ints
from trials.data.index import DatasetIndex
from trials.data.order import epoch_order
from trials.errors import DataError
from trials.job import EvaluationSection
from trials.units import number_of


def hold_out(index: DatasetIndex, evaluation: EvaluationSection) -> tuple[DatasetIndex, DatasetIndex | None]:
    """Return (the samples to train on, those of `evaluation.samples`, or None where it is not given).

    They are drawn with `evaluation.seed` from the samples of an epoch, each at most once. They depend only on the data
    and this seed, so they are the same for every plan, training seed and resumed training. A record that several
    sources name is one sample, and is left out of all of them. Raise DataError when none is left to train on.
    """
    if evaluation.samples is None:
        return index, None
    record = _records(index)
    shown = np.unique(epoch_order(index, evaluation.seed, 0))
    shown = shown[np.sort(np.unique(record[shown], return_index=True)[1])]
    wanted = evaluation.samples
    # Decimal, because 100 times the float 0.07 is above 7.
    count = math.ceil(Decimal(str(wanted)) * len(shown)) if wanted < 1 else int(wanted)
    if count >= len(shown):
        raise DataError(
            f"evaluation.samples: {wanted:g} of the {number_of(len(shown), 'sample')} of data.sources leave none to "
            "train on; lower it, or name other files in evaluation.sources"
        )
    # The 2 gives another random stream than the order's [seed, epoch] and the repeats' [seed, file, 1].
    chosen = np.random.default_rng([evaluation.seed, 0, 2]).permutation(shown)[:count]
    return index.keep(~np.isin(record, record[chosen])), index.keep(np.sort(chosen)).each_once


def without_records(index: DatasetIndex, records: Ints) -> DatasetIndex:
    """Return the samples of other records, as `DatasetIndex.record` counts them. Raise DataError when none is left."""
    kept = index.keep(~np.isin(index.record, records))
    if not len(kept):
        raise DataError(
            f"evaluation.samples: the {number_of(len(records), 'record')} held out leave none of the "
            f"{number_of(len(index), 'sample')} that can be used to train on; lower it"
        )
    return kept


def _records(index: DatasetIndex) -> Ints:
    """Return a number for each sample, equal for those of one record: the same place in the same file, [samples]."""
    paths = {file.path: number for number, file in enumerate(index.files)}
    if len(paths) == len(index.files):
        return np.arange(len(index), dtype=np.int64)
    path = np.array([paths[file.path] for file in index.files], dtype=np.int64)[index.file]
    return np.unique(np.stack([path, index.offset]), axis=1, return_inverse=True)[1].reshape(-1)


def shown_by(index: DatasetIndex, seed: int) -> DatasetIndex:
    """Return the samples that the epochs of this seed show."""
    return index.keep(np.unique(epoch_order(index, seed, 0)))


def trained_on(training: DatasetIndex, seed: int, held_out: DatasetIndex) -> Ints:
    """Return the rows of `held_out` whose records a training with this seed also uses."""
    shown = shown_by(training, seed)
    found = np.zeros(len(held_out), dtype=np.bool_)
    for number, file in enumerate(held_out.files):
        same = [other for other, each in enumerate(shown.files) if each.path == file.path]
        offsets = shown.offset[np.isin(shown.file, same)]
        found |= (held_out.file == number) & np.isin(held_out.offset, offsets)
    return np.flatnonzero(found)
