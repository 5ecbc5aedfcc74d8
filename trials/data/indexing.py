"""Indexing of a dataset: every sample is read and measured once, and unusable lines are listed."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trials.arrays import Ints
from trials.data import formats
from trials.data.cache import LengthsCache
from trials.data.formats import AnnotationFile, Chunk
from trials.data.index import COLUMNS, DatasetIndex
from trials.data.kept.files import KeptTokens, TokenFile
from trials.data.lengths import ONE_FRAME, TOKENS, ChunkLengths, kind_of, placed
from trials.data.measuring import cores, measured
from trials.data.reading import Reading
from trials.data.records.file_chunk import where
from trials.data.records.placement import LOST_VIDEO
from trials.data.records.sample import BadLine, Measurer
from trials.data.records.watched import METADATA
from trials.errors import DataError
from trials.job import DataSection
from trials.sampling import MOST_REPEATS, taken
from trials.units import number_of

Section: TypeAlias = Literal["data", "evaluation"]
"""Section of a job that has sources."""

LISTED = 1000
"""Bad lines that a report lists; all are counted."""
_REMEDIES = {
    LOST_VIDEO: "name the video in the record, as under `videos`, or remove the text; if it is meant, there is nothing "
    "to do",
    ONE_FRAME: "name an image under `images`, or all frames of the video; if one is meant, there is nothing to do",
}
# A choice: names of a warning, which stays a few lines.
_SHOWN_KEYS = 10
_SHOWN_FILES = 3


def set_images(section: Section) -> str:
    """Return the option that gives a source its folder of images, which a source that no job file names needs."""
    return f"`--set {section}.sources.0.images=FOLDER` (0 is the first source)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unused:
    """One kind of thing that usable records say and training does not use."""

    what: str
    records: int
    first: str
    """File and line of the first of them."""

    @property
    def is_mistake(self) -> bool:
        """Whether it nearly always is one."""
        return self.what in _REMEDIES

    @property
    def remedy(self) -> str:
        return _REMEDIES.get(self.what, "nothing to do, if that is meant")

    def __str__(self) -> str:
        return f"{self.what}, in {number_of(self.records, 'record')}, the first is {self.first}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexReport:
    """Findings of indexing besides the usable samples."""

    section: Section
    records: int
    """Lines that are not blank."""
    bad: int
    """Records left out."""
    usable: int
    """Samples of the index: all others, less those that `sampling` leaves out."""
    bad_lines: tuple[BadLine, ...]
    """The first LISTED of them."""
    bad_media: int
    """Records left out that show images or videos."""
    first_bad_media: BadLine | None
    has_media: bool
    """Whether a usable record shows images or videos."""
    wrong_sizes: int
    """Images whose size in the record is not the file's; the file's was used."""
    measured: int
    """Records that no earlier run had measured."""
    max_tokens: int | None
    """Number of tokens that longer samples were cut to; None when none was."""
    cut: int
    """Samples of exactly `max_tokens` tokens."""
    unused: tuple[Unused, ...]

    def origin(self, trained: DatasetIndex) -> str:
        """Return what to write behind the number of an epoch's samples, where they are not each record once.

        `trained` has the samples of the index that are not held out.
        """
        left_out = {
            "that cannot be used": self.bad,
            "left out by `sampling`": self.records - self.bad - self.usable,
            "held out": self.usable - len(trained),
        }
        parts = [f"{count:,} {why}" for why, count in left_out.items() if count]
        shown = [f"{file.path.name} shown {file.repeat:.3g} times" for file in trained.files if file.repeat != 1]
        if not (parts or shown):
            return ""
        more = [f"{len(shown) - _SHOWN_FILES} more files too"] if len(shown) > _SHOWN_FILES else []
        of_records = ", ".join((*parts, f"{len(trained):,} to train on"))
        return f" an epoch ({'; '.join((f'{self.records:,} records: {of_records}', *shown[:_SHOWN_FILES], *more))})"

    @property
    def surprises(self) -> tuple[Unused, ...]:
        """What is unused and may have been meant to be used."""
        return tuple(each for each in self.unused if not (each.is_mistake or each.what.startswith(METADATA)))

    @property
    def mistakes(self) -> tuple[Unused, ...]:
        """What records say and nearly always is a mistake."""
        return tuple(each for each in self.unused if each.is_mistake)

    @property
    def metadata(self) -> str | None:
        """The keys that only describe a record, in one line; None where there are none."""
        found = [each for each in self.unused if each.what.startswith(METADATA)]
        names = ", ".join(each.what.removeprefix(METADATA) for each in found[:_SHOWN_KEYS])
        more = f" and {len(found) - _SHOWN_KEYS} more" if len(found) > _SHOWN_KEYS else ""
        return f"{METADATA}{names}{more}, the first is {found[0].first}" if found else None

    def unused_lines(self) -> tuple[str, ...]:
        """Return a line for each of the first surprises, and one for all metadata."""
        shown = [str(each) for each in self.surprises[:_SHOWN_KEYS]]
        more = len(self.surprises) - len(shown)
        return (*shown, *([f"and {more} more of these"] if more else ()), *([self.metadata] if self.metadata else ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ChunkOfFile:
    """One chunk of one file."""

    number: int
    """Number of its file."""
    file: AnnotationFile
    chunk: Chunk
    key: str
    known: ChunkLengths | None


def build_index(
    data: DataSection,
    measurer: Measurer | None,
    base: Path,
    progress: Callable[[Reading], None] | None = None,
    *,
    cache: Path | None = None,
    workers: int | None = None,
    section: Section = "data",
) -> tuple[DatasetIndex, IndexReport]:
    """Build the index of every usable sample of the sources, whose paths are relative to `base`.

    Without a `measurer`, only files of lengths can be indexed. `cache` is a folder that keeps what was measured;
    `workers` is the number of processes to measure with, all cores when None; `section` is that of the sources. Raise
    DataError for a missing file, an unknown format, the first bad line under `on_error: fail`, or a file of which no
    record can be used.
    """
    files = tuple(file for source in data.sources for file in formats.resolve(source, base))
    store = LengthsCache(cache)
    max_tokens = measurer.max_tokens if measurer else data.max_tokens if data.oversize == "truncate" else None
    show = progress or (lambda _: None)
    parts = tuple(_scanned(files, store, measurer, max_tokens, show))
    missing = [(part.file, part.chunk) for part in parts if part.known is None]
    tally = _Tally(section=section, is_strict=data.on_error == "fail", records=0)
    known_records = sum(part.known.records for part in parts if part.known)
    # Closed on errors as well, which ends the processes that measure.
    with closing(measured(missing, measurer, max_tokens, workers or cores())) as fresh:
        for done, part in enumerate(parts, 1):
            # In order of the chunks, so that the index does not depend on what the cache holds.
            lengths = part.known or store.keep(part.key, next(fresh))
            if not part.known:
                tally.measured += lengths.records
            tally.add(part, lengths)
            show(Reading(records=known_records + tally.measured, share=done / len(parts)))
    index = tally.index(files)
    tally.check_used(index)
    index = _sampled(index)
    return index, tally.report(index, max_tokens)


def _scanned(
    files: tuple[AnnotationFile, ...],
    store: LengthsCache,
    measurer: Measurer | None,
    max_tokens: int | None,
    show: Callable[[Reading], None],
) -> Iterator[_ChunkOfFile]:
    """Yield every chunk, in order, with its cached lengths."""
    records = 0
    for number, file in enumerate(files):
        for chunk in formats.chunks(file):
            key = store.key(file, chunk, measurer, max_tokens)
            known = store.find(key)
            records += known.records if known else 0
            show(Reading(records=records, share=None))
            yield _ChunkOfFile(number=number, file=file, chunk=chunk, key=key, known=known)


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Columns and counts of the chunks so far."""

    section: Section
    is_strict: bool
    columns: dict[str, list[NDArray[Any]]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    records: int = 0
    bad: int = 0
    bad_lines: list[BadLine] = field(default_factory=list)
    records_of: Counter[int] = field(default_factory=Counter)
    """By the numbers of the files."""
    first_bad_of: dict[int, BadLine] = field(default_factory=dict)
    bad_media: int = 0
    first_bad_media: BadLine | None = None
    wrong_sizes: int = 0
    measured: int = 0
    unused: dict[str, Unused] = field(default_factory=dict)
    token_files: list[TokenFile] = field(default_factory=list)
    token_places: list[Ints] = field(default_factory=list)
    token_bytes: int = 0

    def add(self, part: _ChunkOfFile, found: ChunkLengths) -> None:
        """Add a chunk. Raise DataError for a bad line under `on_error: fail`."""
        for line in found.bad_lines(part.file, part.chunk):
            if self.is_strict:
                raise DataError(f"{line}; correct the line, or set data.on_error to skip")
            self.first_bad_of.setdefault(part.number, line)
            if line.shows_media:
                self.bad_media += 1
                self.first_bad_media = self.first_bad_media or line
            # All are counted, but the list must fit into memory and a message.
            if len(self.bad_lines) < LISTED:
                self.bad_lines.append(line)
        columns = found.columns
        moved = {
            "file": np.full(len(columns["line"]), part.number),
            # Chunks count from their own beginning, so that the cache serves them wherever they stand.
            "offset": columns["offset"] + part.chunk.start,
            "line": columns["line"] + part.chunk.line,
            "record": columns["record"] + self.records,
        }
        for name, kind in COLUMNS.items():
            column = moved[name] if name in moved else columns[name]
            self.columns[name].append(column.astype(kind))
        self._add_tokens(columns[TOKENS], found.token_file)
        self.records += found.records
        self.bad += len(found.bad)
        self.records_of[part.number] += found.records
        self.wrong_sizes += found.wrong_sizes
        for each, (count, place) in found.unused.items():
            what = kind_of(each, self.unused)
            known = self.unused.get(what)
            first = known.first if known else where(part.file.path, placed(place, part.chunk))
            self.unused[what] = Unused(what=what, records=count + (known.records if known else 0), first=first)

    def _add_tokens(self, places: Ints, file: TokenFile | None) -> None:
        if file is None:
            self.token_places.append(np.full_like(places, -1))
            return
        self.token_places.append(np.where(places < 0, -1, places + self.token_bytes))
        self.token_files.append(file)
        self.token_bytes += file.size

    def check_used(self, index: DatasetIndex) -> None:
        """Raise DataError for a file of which the index has no sample.

        Its bad lines are no measure of what is lost: an object around all records, or a compressed file, is a few.
        """
        used = set(np.unique(index.file).tolist())
        for number, file in enumerate(index.files):
            if number not in used and number not in self.first_bad_of:
                raise formats.empty(file.path)
            if number not in used:
                raise DataError(
                    f"no sample of {file.path} can be used, of {number_of(self.records_of[number], 'record')}; the "
                    f"first fault is {self.first_bad_of[number]}; correct the lines, or `images` and `format` of the "
                    f"source, as by {set_images(self.section)}, or leave the file out"
                )

    def index(self, files: tuple[AnnotationFile, ...]) -> DatasetIndex:
        columns: dict[str, Any] = {
            name: np.concatenate([np.empty(0, dtype=kind), *self.columns[name]]) for name, kind in COLUMNS.items()
        }
        kept = KeptTokens(
            files=tuple(self.token_files), places=np.concatenate([np.empty(0, dtype=np.int64), *self.token_places])
        )
        return DatasetIndex(files=files, kept=kept if self.token_files else None, **columns)

    def report(self, index: DatasetIndex, max_tokens: int | None) -> IndexReport:
        return IndexReport(
            section=self.section,
            records=self.records,
            bad=self.bad,
            usable=len(index),
            bad_lines=tuple(self.bad_lines),
            bad_media=self.bad_media,
            first_bad_media=self.first_bad_media,
            has_media=any(units.any() for units in self.columns["vision_units"]),
            wrong_sizes=self.wrong_sizes,
            measured=self.measured,
            max_tokens=max_tokens,
            cut=int(np.count_nonzero(index.text_tokens == max_tokens)),
            unused=tuple(self.unused.values()),
        )


def _sampled(index: DatasetIndex) -> DatasetIndex:
    """Return the index after each file's `sampling`, which counts usable samples.

    Raise DataError where an epoch would show each of them too often.
    """
    keep = np.zeros(len(index), dtype=np.bool_)
    files = []
    for number, file in enumerate(index.files):
        rows = np.flatnonzero(index.file == number)
        chosen, share = taken(file.sampling, len(rows))
        # Each factor is within the bound by itself: `repeat` of the source, `repeat_time` of the entry, and the share.
        repeat = file.repeat * share
        if repeat > MOST_REPEATS:
            raise DataError(
                f"annotation file {file.path} has {number_of(len(rows), 'usable sample')}, of which an epoch would "
                f"show each {repeat:,.6g} times, with the sampling {file.sampling}; lower that, `repeat` of the source "
                f"or `repeat_time` of the entry, so that they make at most {MOST_REPEATS} together"
            )
        keep[rows[chosen]] = True
        files.append(replace(file, repeat=repeat))
    return replace(index.keep(keep), files=tuple(files))
