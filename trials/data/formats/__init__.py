"""Dataset formats: what a record means. One module each, found by name, so that a new file is a new format.

`trials.data.containers` reads the records of a file, `trials.data.mixtures` lists the files of a mixture. Here the
three come together.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Protocol

from trials import plugins
from trials.data import containers, mixtures
from trials.data.mixtures import Entry
from trials.data.records.census import Miscounted
from trials.data.records.columns import Columns
from trials.data.records.file_chunk import Chunk, Place, where
from trials.data.records.record import AS_TEXT, Record, RecordError, is_as_text
from trials.data.records.sample import BadLine, Measured, Sample
from trials.errors import DataError, UnknownName
from trials.job import Source

__all__ = ["AnnotationFile", "Chunk", "Place", "chunks", "digest", "empty", "read", "records", "resolve"]

# A choice: some data sets begin with records that are empty or broken.
_LOOKED_AT = 64
"""Records that are tried before a file's format counts as unknown."""
# A choice: keys of a message, which stays one line; records of known formats have fewer.
_SHOWN_KEYS = 10
_LISTS = "messages", "conversations", "conversation", "texts"
"""Keys under which formats have lists of turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotationFile:
    """One file of records, and how they are to be read."""

    path: Path
    images: Path
    """Folder that image names are relative to."""
    format: str
    """Module of this package."""
    repeat: float
    """Times that an epoch shows each record."""
    sampling: str = "all"
    """Which of its usable records take part; see `trials.sampling`."""
    container: str = "json-lines"
    """Module of `trials.data.containers`."""
    columns: Columns | None = None
    """Where a record keeps its parts, when a mixture file says so; else the format's own."""


class Format(Protocol):
    """What a format's module offers."""

    def recognises(self, record: Record, container: str) -> bool:
        """Return whether the record looks like this format. Other records are no error."""

    def read(self, record: Record, file: AnnotationFile) -> Sample | Measured:
        """Return what the record says. Raise RecordError for one that cannot be used."""


FORMATS: plugins.Plugins[Format] = plugins.Plugins(__name__)


def resolve(source: Source, base: Path) -> tuple[AnnotationFile, ...]:
    """Return the record files of a source, whose paths are relative to `base`; all of them can be opened.

    Raise DataError for a file or a folder of images that is not there, for a file in no format known here, and for a
    faulty mixture file.
    """
    path = _absolute(base / source.path)
    images = _absolute(base / source.images) if source.images else path.parent
    mixture = mixtures.expand(path, images, source.names)
    if mixture:
        return tuple(_listed(source, entry, mixture.format) for entry in mixture.entries)
    if source.names is not None:
        raise DataError(f"{path} is no mixture file, so `names` selects nothing in it; remove `names` from the source")
    return (_listed(source, Entry(path=path, images=images), None),)


def chunks(file: AnnotationFile) -> Iterator[Chunk]:
    """Yield the whole file in parts that can be read independently. Raise DataError for a file without such parts."""
    return containers.load(file.container).chunks(file.path)


def digest(file: AnnotationFile, chunk: Chunk) -> str:
    """Return a digest that is equal for chunks of equal content."""
    return containers.load(file.container).digest(file.path, chunk)


def records(file: AnnotationFile, chunk: Chunk) -> Iterator[tuple[Place, Sample | Measured | BadLine]]:
    """Yield every record of the chunk that is not blank, in order and in bounded memory.

    Raise DataError for one that its reader would change.
    """
    for place, record in containers.load(file.container).records(file.path, chunk):
        yield place, _said(file, place, record)


def read(file: AnnotationFile, place: Place) -> Sample | BadLine:
    """Return one record again."""
    try:
        found = _said(file, place, containers.load(file.container).read(file.path, place))
    except RecordError as error:
        return BadLine(path=file.path, place=place, reason=str(error))
    if isinstance(found, Measured):
        return BadLine(path=file.path, place=place, reason="lengths alone, without a conversation to train on")
    return found


@cache
def load(name: str) -> Format:
    """Return the format of this name. Raise DataError with the names that exist."""
    try:
        return plugins.load(FORMATS, name)
    except UnknownName as error:
        raise DataError(f"data.sources: format {error}, auto") from error


def detect(path: Path, container: str) -> str:
    """Return the name of the one format that recognises one of the first records. Raise DataError when none does."""
    found: list[str] = []
    looked_at = list(islice(_records(path, container), _LOOKED_AT))
    for record in looked_at:
        # The first record that a format recognises decides; others may be blank or broken.
        if not found and not isinstance(record, RecordError):
            found = [name for name, module in plugins.each(FORMATS) if module.recognises(record, container)]
    if len(found) == 1:
        return found[0]
    if not looked_at:
        raise empty(path)
    choices = ", ".join(found or plugins.names(FORMATS))
    remedy = f"set `format` of this source to one of: {choices}"
    if found:
        raise DataError(f"annotation file {path} looks like {' and '.join(found)}; {remedy}")
    first = looked_at[0]
    if isinstance(first, RecordError):
        is_json = container.startswith("json")
        remedy = "write one JSON object on each line, or a list of them, in UTF-8" if is_json else "correct its rows"
        seen = f"its first record: {first}"
    else:
        keys = [*islice(first, _SHOWN_KEYS), *(["more"] if len(first) > _SHOWN_KEYS else [])]
        seen = f"its first record has {', '.join(keys) or 'no keys'}"
        remedy = next((f"`{key}` {AS_TEXT}" for key in _LISTS if is_as_text(first.get(key))), remedy)
    raise DataError(f"annotation file {path} is in no format known here ({seen}); {remedy}")


def empty(path: Path) -> DataError:
    """Return the error for a file without a record, which `resolve` finds only where it detects the format."""
    return DataError(f"annotation file {path} is empty; write the dataset again, or leave the file out")


def _records(path: Path, container: str) -> Iterator[Record | RecordError]:
    for chunk in containers.load(container).chunks(path):
        for _, record in containers.load(container).records(path, chunk):
            yield record


def _said(file: AnnotationFile, place: Place, record: Record | RecordError) -> Sample | Measured | BadLine:
    try:
        if isinstance(record, RecordError):
            raise record
        return load(file.format).read(record, file)
    except RecordError as error:
        return BadLine(path=file.path, place=place, reason=str(error))
    except Miscounted as error:
        raise DataError(
            f"{where(file.path, place)}: {error}; this is a fault of autotune: report it with the record, and leave "
            "the record out until it is mended"
        ) from error


def _listed(source: Source, entry: Entry, usual: str | None) -> AnnotationFile:
    container = containers.recognise(entry.path)
    name = usual or detect(entry.path, container) if source.format == "auto" else source.format
    load(name)
    # Otherwise every record with an image would be a bad line, and the texts that are left would be trained on.
    if not os.path.isdir(entry.images):  # noqa: PTH112 - false, not an error, where a folder is closed
        raise DataError(f"images of {entry.path}: {entry.images} is not a folder; correct it, or create the folder")
    if source.sampling != "all" and entry.sampling != "all":
        raise DataError(
            f"{source.path} lists {entry.path} with the sampling {entry.sampling}, and the source has the sampling "
            f"{source.sampling}; keep one"
        )
    return AnnotationFile(
        path=entry.path,
        images=entry.images,
        format=name,
        repeat=source.repeat * entry.repeat,
        sampling=entry.sampling if source.sampling == "all" else source.sampling,
        container=container,
        columns=entry.columns,
    )


def _absolute(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, ValueError, RuntimeError) as error:  # a null character, or links that lead to themselves
        raise DataError(f"annotation file {path} cannot be found: {error}; correct its path") from error
