"""Containers: how a file holds its records, whatever the records mean. One module each, found by name."""

import codecs
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Protocol

from trials import plugins
from trials.data.containers.delimited import DELIMITERS
from trials.data.records.file_chunk import BLOCK_BYTES, Chunk, Place, open_annotations
from trials.data.records.record import MAX_RECORD_BYTES, Record, RecordError
from trials.errors import DataError
from trials.regular_file import LFS_POINTER

_TABLE_SUFFIXES = {".parquet", ".arrow"}
_TABLE_STARTS = (b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")
_ARCHIVES = {
    "a tar archive, as of WebDataset": (257, b"ustar"),
    "a zip archive": (0, b"PK\x03\x04"),
    "a 7z archive": (0, b"7z\xbc\xaf\x27\x1c"),
    "a gzip file": (0, b"\x1f\x8b"),
    "a zstd file": (0, b"\x28\xb5\x2f\xfd"),
    "an lz4 file": (0, b"\x04\x22\x4d\x18"),
    "an xz file": (0, b"\xfd7zXZ\x00"),
    # The start of its first block, because a text may begin with `BZh`.
    "a bzip2 file": (4, b"1AY&SY"),
}
"""Place and value of the bytes by which an archive is known."""

_OTHER_TEXTS = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE),
}
"""Byte order marks; that of UTF-32 may begin like the other."""


class Container(Protocol):
    """What a container's module offers. All functions raise DataError for a missing or unreadable file."""

    def chunks(self, path: Path) -> Iterator[Chunk]:
        """Yield the whole file in parts, in order, without decoding the records where that can be avoided."""

    def digest(self, path: Path, chunk: Chunk) -> str:
        """Return a digest that is equal for equal content, wherever it stands."""

    def records(self, path: Path, chunk: Chunk) -> Iterator[tuple[Place, Record | RecordError]]:
        """Yield every record of the chunk that is not blank, in order and in bounded memory."""

    def read(self, path: Path, place: Place) -> Record:
        """Return one record again. Raise RecordError when none can be read there."""


CONTAINERS: plugins.Plugins[Container] = plugins.Plugins(__name__)


@cache
def load(name: str) -> Container:
    """Return the container of this name, as `recognise` returns it."""
    return plugins.load(CONTAINERS, name)


def recognise(path: Path) -> str:
    """Return the name of the file's container, from its beginning. Raise DataError for an archive or a missing file."""
    if os.path.isdir(path):  # noqa: PTH112 - false, not an error, for what cannot be a path
        return "table"
    with open_annotations(path) as stream:
        start = stream.read(BLOCK_BYTES)
        for name, marks in _OTHER_TEXTS.items():
            if start.startswith(marks):
                raise DataError(
                    f"annotation file {path} is text in {name}; write it in UTF-8, as by `iconv -f {name} -t UTF-8`"
                )
        if start.startswith(LFS_POINTER):
            raise DataError(
                f"annotation file {path} is a pointer of Git LFS, not the file itself; run `git lfs pull` in "
                f"{path.parent}"
            )
        for name, (place, mark) in _ARCHIVES.items():
            if start.startswith(mark, place):
                raise DataError(
                    f"annotation file {path} is {name}, which cannot be read; extract it, or write its records as "
                    "JSON lines or Parquet"
                )
        if path.suffix.lower() in DELIMITERS:
            return "delimited"
        if path.suffix.lower() in _TABLE_SUFFIXES or start.startswith(_TABLE_STARTS):
            return "table"
        if not start.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            return "json-lines"
        stream.seek(len(start) - len(start.removeprefix(codecs.BOM_UTF8).lstrip()))
        line = stream.readline(MAX_RECORD_BYTES)
        # Lists on lines of their own are packed samples, and each is reported with its line as a fault.
        return "json-lines" if line.rstrip().endswith(b"]") and stream.read(BLOCK_BYTES).strip() else "json-list"
