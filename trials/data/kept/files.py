"""Files of sealed tokens, one for each chunk of an annotation file."""

import logging
import os
import shutil
import struct
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trials.arrays import Ints
from trials.data.kept.sealed import is_whole

_LENGTH = struct.Struct("<I")
_GIBI = 1 << 30
# Choices: checkpoints of a training need room on the same disk, and tokens that are not kept are encoded again.
_LEAST_FREE = 20 * _GIBI
_LEAST_SHARE = 0.1
"""Bytes, or on a small disk its share, that files of tokens leave free."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """A file of sealed tokens. It may be missing: it is a cache."""

    path: Path
    size: int
    """Bytes that it has if it is whole."""

    def is_there(self) -> bool:
        """Return whether it is there in its full size."""
        try:
            return self.path.stat().st_size == self.size
        except OSError:
            return False

    def read(self, place: int) -> bytes:
        """Return the sealed tokens that begin at a byte, empty where there are none.

        A file with damaged ones is removed, so that the next command that reads the data makes it again.
        """
        # Read, not mapped into memory: a process that touches a mapped page behind the end of a cut file is killed.
        try:
            with self.path.open("rb", buffering=0) as stream:
                stream.seek(place)
                head = stream.read(_LENGTH.size)
                length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else 0
                sealed = stream.read(length) if length <= self.size else b""
        except FileNotFoundError:
            return b""
        except OSError as error:
            logger.info("kept tokens %s cannot be read (%s); they are made again", self.path, error)
            return b""
        if is_whole(sealed):
            return sealed
        try:
            self.path.unlink()
        except OSError as error:
            logger.info("damaged tokens %s cannot be removed (%s)", self.path, error)
        else:
            logger.warning("kept tokens %s were damaged; they are removed and made again", self.path)
        return b""


@dataclass(frozen=True, kw_only=True, eq=False)
class KeptTokens:
    """Where the sealed tokens of the samples of an index lie."""

    files: tuple[TokenFile, ...]
    places: NDArray[np.int64]
    """First byte of each sample's, counted through all files, [samples]; -1 where it has none."""

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(accumulate((file.size for file in self.files), initial=0))

    def keep(self, rows: Ints | NDArray[np.bool_]) -> "KeptTokens":
        """Return the kept tokens of these rows alone."""
        return replace(self, places=self.places[rows])

    def sealed(self, row: int) -> bytes:
        """Return the sealed tokens of a sample, empty where none are kept."""
        place = int(self.places[row])
        if place < 0:
            return b""
        number = bisect_right(self._starts, place) - 1
        return self.files[number].read(place - self._starts[number])


def framed(sealed: bytes) -> bytes:
    """Return sealed tokens as they stand in a file."""
    return _LENGTH.pack(len(sealed)) + sealed


def has_room(folder: Path, size: int) -> bool:
    """Return whether enough disk space stays free after `size` bytes are written to `folder`, which need not exist."""
    there = next((each for each in (folder, *folder.parents) if os.path.isdir(each)), Path())  # noqa: PTH112
    try:
        disk = shutil.disk_usage(there)
    except OSError:
        return False
    return disk.free - size > min(_LEAST_FREE, int(_LEAST_SHARE * disk.total))
