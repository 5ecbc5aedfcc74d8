"""JSON Lines: one record a line."""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from trials.data.records import record
from trials.data.records.file_chunk import BLOCK_BYTES, Chunk, Place, digest, grouped, line_ends, open_annotations
from trials.data.records.record import Record, RecordError, parse, parsed

__all__ = ["chunks", "digest", "read", "records"]


def chunks(path: Path) -> Iterator[Chunk]:
    """Yield the chunks, found by counting line feeds."""
    return grouped((0, 1), line_ends(path))


def records(path: Path, chunk: Chunk) -> Iterator[tuple[Place, Record | RecordError]]:
    """Yield every line that is not blank. A line above MAX_RECORD_BYTES is skipped in small blocks."""
    with open_annotations(path) as stream:
        stream.seek(chunk.start)
        number, offset = chunk.line, chunk.start
        while offset < chunk.end and (line := _line(stream)):
            if line.removeprefix(codecs.BOM_UTF8).strip():
                yield (offset, number), parsed(line)
            offset += len(line)
            number += 1
            if len(line) > record.MAX_RECORD_BYTES:
                while line and not line.endswith(b"\n"):
                    line = stream.readline(BLOCK_BYTES)
                    offset += len(line)


def read(path: Path, place: Place) -> Record:
    """Return the record at this place. Raise RecordError."""
    with open_annotations(path) as stream:
        stream.seek(place[0])
        return parse(_line(stream))


def _line(stream: IO[bytes]) -> bytes:
    """Return the next line, cut off behind the longest that may be read."""
    return stream.readline(record.MAX_RECORD_BYTES + 1)
