"""The check that this machine has the files that were indexed, which may have been on another node."""

import os

import numpy as np

from trials.arrays import Ints
from trials.data.index import DatasetIndex
from trials.data.loader import encode
from trials.data.records.sample import Encoder
from trials.errors import DataError

# A choice: a video takes up to a second to read, and some dead links are usual in large data sets.
_FILES, _OF_FILE = 8, 4
"""Annotation files of which samples are tried, and samples of each."""


def check_readable(index: DatasetIndex, encoder: Encoder) -> None:
    """Raise DataError where most of some samples of an annotation file cannot be read, those with images before others.

    The running count of blank samples notices lost files only where most samples of a rank are in them. One rank of
    each node reads; on the others nothing is done.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    for file in _spread(np.unique(index.file), _FILES):
        rows = np.flatnonzero(index.file == file)
        with_images = rows[index.vision_units[rows] > 0]
        tried = _spread(with_images if len(with_images) >= _OF_FILE else rows, _OF_FILE)
        faults = [fault for row in tried if (fault := _fault(index, row, encoder)) is not None]
        if len(tried) == _OF_FILE and 2 * len(faults) > _OF_FILE:
            raise DataError(
                f"{len(faults)} of {_OF_FILE} samples of {index.files[file].path} that were tried cannot be read, the "
                f"last one: {faults[-1]}; restore the files on this machine, and run the same command again"
            )


def _spread(values: Ints, most: int) -> list[int]:
    """Return `most` of the values, evenly spread, or all where there are fewer."""
    places = np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(np.int64)
    return [int(value) for value in values[places]]


def _fault(index: DatasetIndex, row: int, encoder: Encoder) -> str | None:
    try:
        encode(index, row, encoder, pixels=True)
    except DataError as error:
        return str(error)
    return None
