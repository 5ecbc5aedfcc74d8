"""CSV and TSV files, whose first row names the columns; one further row a record, and all cells texts.

The standard library reads them strictly. A row with another number of cells is refused, since its cells would move to
other columns or be lost. After an unclosed quote it is unknown where the next row begins, so the file is refused.
"""

import csv
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from trials.data.records import file_chunk, record
from trials.data.records.file_chunk import Chunk, Place, grouped, open_annotations
from trials.data.records.record import Record, RecordError
from trials.errors import DataError, in_one_line
from trials.units import number_of

DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""What stands between two cells, by the end of the file's name."""
_BYTE_ORDER_MARK = "\ufeff"


def chunks(path: Path) -> Iterator[Chunk]:
    """Yield the chunks, found by reading the rows. Raise DataError for a fault in the header or the quotes."""
    _, start = _header(path)
    yield from grouped(start, _ends(path, start))


def digest(path: Path, chunk: Chunk) -> str:
    """Return the BLAKE2b of the header and the chunk's bytes."""
    names, _ = _header(path)
    said = repr((_delimiter(path), names, file_chunk.digest(path, chunk)))
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


def records(path: Path, chunk: Chunk) -> Iterator[tuple[Place, Record | RecordError]]:
    """Yield every row that is not blank."""
    names, _ = _header(path)
    with open_annotations(path) as stream:
        rows = _Rows(path, stream, (chunk.start, chunk.line))
        while rows.at[0] < chunk.end and (row := rows.following()) is not None:
            if not _is_blank(row):
                yield rows.begin, _record(names, row)


def read(path: Path, place: Place) -> Record:
    """Return the row at this place. Raise RecordError."""
    names, _ = _header(path)
    with open_annotations(path) as stream:
        row = _Rows(path, stream, place).following()
    found = RecordError("the file ends before this row") if row is None else _record(names, row)
    if isinstance(found, RecordError):
        raise found
    return found


def _header(path: Path) -> tuple[tuple[str, ...], Place]:
    """Return the names of the columns, none of an empty file, and where the rows begin. Raise DataError."""
    with open_annotations(path) as stream:
        rows = _Rows(path, stream, (0, 1))
        while (row := rows.following()) is not None and _is_blank(row):
            pass
    names = tuple(row or ())
    if not _is_utf8(names):
        raise DataError(f"annotation file {path} has a header that is not UTF-8; write the file in UTF-8")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(
            f"annotation file {path} names the column {repr(twice[0])[:40]} twice in its header, and one of them would "
            "be lost; keep one, or rename it"
        )
    return names, rows.at


def _ends(path: Path, start: Place) -> Iterator[Place]:
    """Yield where each row ends."""
    with open_annotations(path) as stream:
        rows = _Rows(path, stream, start)
        while rows.following() is not None:
            yield rows.at


def _record(names: tuple[str, ...], row: list[str]) -> Record | RecordError:
    if len(row) != len(names):
        return RecordError(
            f"the row has {number_of(len(row), 'cell')} and the header {len(names)}; put a cell that holds the "
            'delimiter between quotes ("), and give an empty cell for a missing one'
        )
    if not _is_utf8(row):
        return RecordError("the row is not UTF-8; write the file in UTF-8")
    return dict(zip(names, row, strict=True))


def _is_utf8(cells: list[str] | tuple[str, ...]) -> bool:
    """Return whether no cell holds a byte that could not be decoded."""
    try:
        "".join(cells).encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_blank(row: list[str]) -> bool:
    return len(row) < 2 and not "".join(row).strip()


def _delimiter(path: Path) -> str:
    return DELIMITERS[path.suffix.lower()]


@dataclass(slots=True)
class _Lines:
    """Lines of a file as texts; bytes that are not UTF-8 become halves of surrogate pairs."""

    stream: IO[bytes]
    at: Place
    """Where the next line begins."""
    row: int
    """Byte where the row begins to which the next line belongs."""

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self.stream.readline(record.MAX_RECORD_BYTES + 1)
        if not line:
            raise StopIteration
        offset, number = self.at
        self.at = offset + len(line), number + 1
        if self.at[0] - self.row > record.MAX_RECORD_BYTES:
            raise csv.Error(f"it is longer than {record.MAX_RECORD_BYTES >> 20} MiB")
        text = line.decode(errors="surrogateescape")
        return text if offset else text.removeprefix(_BYTE_ORDER_MARK)


class _Rows:
    """Rows of a file in their order, from a place at which one begins."""

    def __init__(self, path: Path, stream: IO[bytes], begin: Place) -> None:
        stream.seek(begin[0])
        # One limit for all of the process, of 128 Ki characters; images in base64 are longer.
        csv.field_size_limit(record.MAX_RECORD_BYTES)
        self._path = path
        self._lines = _Lines(stream, begin, begin[0])
        self._rows = csv.reader(self._lines, delimiter=_delimiter(path), strict=True)
        self.begin = begin
        """Where the last row begins."""

    @property
    def at(self) -> Place:
        """Where the next row begins."""
        return self._lines.at

    def following(self) -> list[str] | None:
        """Return the cells of the next row, None at the end. Raise DataError for a fault in its quotes."""
        self.begin, self._lines.row = self.at, self.at[0]
        try:
            return next(self._rows, None)
        except csv.Error as error:
            raise DataError(
                f"annotation file {self._path} cannot be read as a table: the row that begins in line {self.begin[1]} "
                f'has a fault: {in_one_line(str(error))}; close each quote ("), and write one inside of a quoted cell '
                "twice, or write the data as JSON lines"
            ) from error
