"""Reads a whole dataset once, measures every sample, and lists the lines that cannot be trained on."""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from trials.data import formats
from trials.data.formats import AnnotationFile
from trials.data.images import image_size
from trials.data.index import COLUMNS, DatasetIndex
from trials.data.jsonl import Place, open_annotations
from trials.data.sample import BadLine, Encoder, Lengths, Sample
from trials.errors import DataError
from trials.job import DataSection, Source

LISTED = 1000
"""Bad lines that a report lists; all are counted."""
_PROGRESS_EVERY = 256

_TYPECODES = {np.int32: "i", np.int64: "q"}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexReport:
    """What indexing found besides the usable samples."""

    records: int
    """Lines that are not blank."""
    bad: int
    """Records left out."""
    bad_lines: tuple[BadLine, ...]
    """The first LISTED of them."""
    wrong_sizes: int
    """Images whose size in the record is not the file's; the file's was used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    place: Place
    lengths: Lengths
    wrong_sizes: int


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Grows while the records go by."""

    columns: dict[str, "array[int]"] = field(
        default_factory=lambda: {name: array(_TYPECODES[kind]) for name, kind in COLUMNS.items()}
    )
    records: int = 0
    bad_lines: list[BadLine] = field(default_factory=list)
    wrong_sizes: int = 0

    def reject(self, line: BadLine) -> None:
        self.records += 1
        if len(self.bad_lines) < LISTED:
            self.bad_lines.append(line)

    def accept(self, file: int, found: _Measured) -> None:
        self.records += 1
        self.wrong_sizes += found.wrong_sizes
        lengths = found.lengths
        row = (file, *found.place, lengths.vision_units, lengths.text_tokens, lengths.target_tokens)
        for column, value in zip(self.columns.values(), row, strict=True):
            column.append(value)

    def index(self, files: tuple[AnnotationFile, ...]) -> DatasetIndex:
        columns: dict[str, Any] = {name: np.array(self.columns[name], dtype=kind) for name, kind in COLUMNS.items()}
        return DatasetIndex(files=files, **columns)

    def report(self) -> IndexReport:
        return IndexReport(
            records=self.records,
            bad=self.records - len(self.columns["file"]),
            bad_lines=tuple(self.bad_lines),
            wrong_sizes=self.wrong_sizes,
        )


def build_index(
    data: DataSection, encoder: Encoder, base: Path, progress: Callable[[int], None] | None = None
) -> tuple[DatasetIndex, IndexReport]:
    """Index of every usable sample of the sources, whose paths are relative to `base`.

    `progress` is told the number of records read so far, now and then and at the end. Raises DataError for a missing
    file, an unknown format, a bad line under `on_error: fail`, or when no sample is usable.
    """
    files = tuple(file for source in data.sources for file in _files(source, base))
    tally = _Tally()
    for number, found in _measured(files, encoder):
        if isinstance(found, _Measured):
            tally.accept(number, found)
        elif data.on_error == "fail":
            raise DataError(f"{found}; correct the line, or set data.on_error to skip")
        else:
            tally.reject(found)
        if progress and tally.records % _PROGRESS_EVERY == 0:
            progress(tally.records)
    if progress:
        progress(tally.records)
    return _usable(tally.index(files), tally.report())


def _files(source: Source, base: Path) -> tuple[AnnotationFile, ...]:
    """The record files of a source; all of them can be opened, so that a long indexing run does not end on one."""
    path = (base / source.path).resolve()
    open_annotations(path).close()
    images = (base / source.images).resolve() if source.images else path.parent
    name = formats.detect(path) if source.format == "auto" else source.format
    whole = AnnotationFile(path=path, images=images, format=name, repeat=source.repeat)
    files = tuple(formats.load(name).files(whole))
    for file in files:
        open_annotations(file.path).close()
    return files


def _measured(files: tuple[AnnotationFile, ...], encoder: Encoder) -> Iterator[tuple[int, _Measured | BadLine]]:
    """Every record, in order, with the number of its file."""
    for number, file in enumerate(files):
        for place, record in formats.load(file.format).records(file):
            if isinstance(record, BadLine):
                yield number, record
                continue
            try:
                yield number, _measure(record, place, encoder)
            except DataError as error:
                yield number, BadLine(path=file.path, line=place[1], reason=str(error))


def _measure(sample: Sample, place: Place, encoder: Encoder) -> _Measured:
    """Raises DataError for a sample that cannot be trained on."""
    sizes = tuple(image_size(path) for path in sample.images)
    lengths = encoder.measure(sample, sizes)
    if lengths.target_tokens == 0:
        raise DataError("no target tokens: no assistant turn to learn from")
    stated = zip(sample.image_sizes, sizes, strict=True)
    return _Measured(
        place=place, lengths=lengths, wrong_sizes=sum(said is not None and said != real for said, real in stated)
    )


def _usable(index: DatasetIndex, report: IndexReport) -> tuple[DatasetIndex, IndexReport]:
    if len(index):
        return index, report
    sources = ", ".join(str(file.path) for file in index.files)
    first = f"; the first fault is {report.bad_lines[0]}" if report.bad_lines else ""
    raise DataError(
        f"no sample of {sources} can be used, of {report.records} records{first}; correct the lines, or `images` and "
        "`format` of the source"
    )
