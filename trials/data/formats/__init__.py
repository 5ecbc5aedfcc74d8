"""Dataset formats: one module each, found by name, so that a new file is a new format.

A format module has the functions of `Format`. What several formats share stands in `trials.data`, not here.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol, cast

from trials import plugins
from trials.data.jsonl import Place
from trials.data.sample import BadLine, Sample
from trials.errors import DataError, UnknownName


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotationFile:
    """One file of records, and how they are to be read."""

    path: Path
    images: Path
    """Folder that image names are relative to."""
    format: str
    """Module of this package."""
    repeat: float
    """How often an epoch shows each record."""


class Format(Protocol):
    """What a format module offers. A record that cannot be used is a BadLine, never an exception."""

    def recognises(self, path: Path) -> bool:
        """Whether the file's beginning looks like this format. False, not an error, for any other content."""

    def files(self, source: AnnotationFile) -> Iterator[AnnotationFile]:
        """The record files behind a source: itself, or those that it lists. Raises DataError for a bad list."""

    def records(self, file: AnnotationFile) -> Iterator[tuple[Place, Sample | BadLine]]:
        """Every record with its place, in order and in bounded memory. Raises DataError when there is no file."""

    def read(self, file: AnnotationFile, place: Place) -> Sample | BadLine:
        """One record again."""


@cache
def load(name: str) -> Format:
    """The format of this name. Raises DataError with the names that exist."""
    try:
        return cast(Format, plugins.load(__name__, name))
    except UnknownName as error:
        raise DataError(f"data.sources: format {error}, auto") from error


def detect(path: Path) -> str:
    """Name of the one format that recognises the file. Raises DataError when none does, or several do."""
    found = [name for name, module in plugins.each(__name__) if cast(Format, module).recognises(path)]
    if len(found) == 1:
        return found[0]
    if not path.stat().st_size:
        raise DataError(f"annotation file {path} is empty; write the dataset again, or take it out of data.sources")
    what = f"looks like {' and '.join(found)}" if found else "is in no format known here"
    choices = ", ".join(found or plugins.names(__name__))
    raise DataError(f"annotation file {path} {what}; set `format` of this source to one of: {choices}")
