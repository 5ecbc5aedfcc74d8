"""Chunks: consecutive parts of an annotation file, each small enough to be held in memory, and read by any process."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

from trials.errors import DataError
from trials.regular_file import open_regular

# Choices: one process measures a chunk in seconds, so that the last ones of a file keep all processes busy.
CHUNK_RECORDS = 4096
CHUNK_BYTES = 8 << 20
"""Most records and bytes of a chunk, which holds at least one record, whatever its size."""
_LINE_FEED = re.compile(rb"\n")
BLOCK_BYTES = 1 << 20
"""Bytes of one read where nothing needs more."""

Place: TypeAlias = tuple[int, int]
"""Where a record begins: byte or row, and line counted from 1. A line of a table other than CSV is its row + 1."""


def where(path: Path, place: Place) -> str:
    """Return `file:line` for messages; `file:1:column`, in bytes, where records share the first line."""
    offset, line = place
    return f"{path}:{line}" + (f":{offset + 1}" if line == 1 and offset else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Bytes, or rows of a table, from `start` up to and without `end`."""

    start: int
    end: int
    line: int
    """Line of the start, counted from 1."""


def open_annotations(path: Path) -> IO[bytes]:
    """Open a file for reading. Raise DataError with the remedy when there is none."""
    try:
        return open_regular(path)
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be opened ({reason})"
        remedy = "correct its path, which is relative to the folder of the job file or meta file that names it"
        raise DataError(f"annotation file {path} {why}; {remedy}") from error


def line_ends(path: Path) -> Iterator[Place]:
    """Yield where each line ends and the next begins, and at last where the file ends."""
    position, line = 0, 1
    with open_annotations(path) as stream:
        while block := stream.read(BLOCK_BYTES):
            for match in _LINE_FEED.finditer(block):
                line += 1
                yield position + match.end(), line
            position += len(block)
    yield position, line


def grouped(start: Place, ends: Iterable[Place]) -> Iterator[Chunk]:
    """Yield the chunks of a file whose records begin at `start` and end at `ends`."""
    begin = last = start
    records = 0
    for end in ends:
        if records == CHUNK_RECORDS or (records and end[0] - begin[0] > CHUNK_BYTES):
            yield Chunk(start=begin[0], end=last[0], line=begin[1])
            begin, records = last, 0
        last = end
        records += 1
    if last[0] > begin[0]:
        yield Chunk(start=begin[0], end=last[0], line=begin[1])


def digest(path: Path, chunk: Chunk) -> str:
    """Return the BLAKE2b digest of the chunk's bytes."""
    found = hashlib.blake2b(digest_size=16)
    with open_annotations(path) as stream:
        stream.seek(chunk.start)
        left = chunk.end - chunk.start
        while left > 0 and (block := stream.read(min(left, BLOCK_BYTES))):
            found.update(block)
            left -= len(block)
        # A chunk at the end of its file differs: there, a list without an end is a fault.
        found.update(b"last" if not stream.read(1) else b"")
    return found.hexdigest()
