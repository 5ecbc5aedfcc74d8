"""Samples with the lengths of a stored dataset, drawn from its histogram."""

from pathlib import Path

import numpy as np

from trials.data.formats import AnnotationFile
from trials.data.index import DatasetIndex
from trials.workload import DataProfile

_BIN_TOKENS = 64
"""Width of the histogram's bins: stored tokens are rounded up to a multiple of it."""
_MOST = (1 << 31) - 1


def drawn_index(data: DataProfile, most: int) -> DatasetIndex:
    """Return an index of at most `most` samples, evenly spread over the histogram; without files.

    Tokens are spread evenly over their bins, so their mean is near the dataset's; each sample has the
    dataset's share of targets. Raise ValueError for a histogram
    that describes no dataset.
    """
    table = np.array(data.histogram, dtype=np.float64).reshape(-1, 3)
    units, tokens, counts = table.T
    if not len(table) or not np.isfinite(table).all() or (table < 0).any() or max(units.max(), tokens.max()) > _MOST:
        raise ValueError("the stored histogram of lengths describes no dataset")
    ends = np.cumsum(counts)
    total = float(ends[-1])
    if total < 1:
        raise ValueError("the stored histogram of lengths has no sample")
    count = int(min(total, most))
    # Evenly spaced instead of drawn at random: the sample has the mean and the tails of the whole.
    places = (np.arange(count) + 0.5) * total / count
    bins = np.minimum(np.searchsorted(ends, places, side="right"), len(table) - 1)
    inside = np.clip((places - (ends - counts)[bins]) / counts[bins], 0.0, 1.0)
    lengths = np.floor(tokens[bins] - _BIN_TOKENS + 1 + inside * _BIN_TOKENS)
    drawn = np.clip(lengths, 1, max(1, min(data.longest_text_tokens, _MOST))).astype(np.int32)
    numbers = np.arange(count)
    targets = np.rint(data.target_share * drawn)
    return DatasetIndex(
        files=(AnnotationFile(path=Path(), images=Path(), format="", repeat=1.0),),
        file=np.zeros(count, dtype=np.int32),
        offset=numbers.astype(np.int64),
        line=(numbers + 1).astype(np.int32),
        record=numbers.astype(np.int64),
        vision_units=units[bins].astype(np.int32),
        text_tokens=drawn,
        target_tokens=np.clip(targets, 1, drawn).astype(np.int32),
    )
