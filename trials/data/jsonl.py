"""Lines of a JSON Lines file with their place, in bounded memory, and one line again by its place."""

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias

from trials.errors import DataError

MAX_LINE_BYTES = 16 << 20
"""A longer line is not read into memory, and is reported."""

Place: TypeAlias = tuple[int, int]
"""Byte offset and line number, the latter counted from 1."""


class LineError(ValueError):
    """A line that holds no JSON object; the message says what it holds."""


def open_annotations(path: Path) -> IO[bytes]:
    """The file, open for reading. Raises DataError with the remedy when there is none."""
    try:
        return path.open("rb")
    except OSError as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be opened ({error.strerror})"
        remedy = "correct its path, which is relative to the folder of the job file or meta file that names it"
        raise DataError(f"annotation file {path} {why}; {remedy}") from error


def lines(path: Path) -> Iterator[tuple[Place, bytes]]:
    """Every line that is not blank, with its place. A line above MAX_LINE_BYTES comes cut off behind that size."""
    with open_annotations(path) as stream:
        number = offset = 0
        while line := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            place = (offset, number)
            offset += len(line) + _skip_rest(stream, line)
            if line.removeprefix(codecs.BOM_UTF8).strip():
                yield place, line


def _skip_rest(stream: IO[bytes], line: bytes) -> int:
    """Moves to the end of the line that `line` begins; returns how many bytes were passed over."""
    skipped = 0
    while len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
        line = stream.readline(MAX_LINE_BYTES + 1)
        skipped += len(line)
    return skipped


def line_at(path: Path, offset: int) -> bytes:
    """The line that begins at this byte; empty behind the end of the file."""
    with open_annotations(path) as stream:
        stream.seek(offset)
        return stream.readline(MAX_LINE_BYTES + 1)


def parse(line: bytes) -> dict[str, Any]:
    """The line's JSON object; a byte order mark and white space around it are fine. Raises LineError."""
    if len(line) > MAX_LINE_BYTES:
        raise LineError(f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        value = json.loads(line.removeprefix(codecs.BOM_UTF8).decode().rstrip())
    except UnicodeDecodeError as error:
        raise LineError(f"byte {error.start} of the line is not UTF-8") from error
    except json.JSONDecodeError as error:  # its own text counts lines inside the line
        raise LineError(f"the line is not JSON: {error.msg} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise LineError(f"the line is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise LineError(f"the line holds a JSON {type(value).__name__}, not an object")
    return value
