"""Lengths of one chunk of an annotation file: measured record by record, kept as columns."""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from trials.arrays import Ints
from trials.data import formats
from trials.data.formats import AnnotationFile, Chunk, Place
from trials.data.kept.files import TokenFile, framed
from trials.data.records.images import ImageHeader, image_header
from trials.data.records.sample import BadLine, Clip, Image, Lengths, Measured, Measurer, Sample, Video
from trials.data.records.videos import clip_of
from trials.data.records.watched import OTHERS
from trials.errors import DataError, PassingFault, in_one_line

TOKENS = "tokens"
"""Column of the place of a sample's sealed tokens, -1 for none."""
COLUMNS = ("offset", "line", "record", "kind", "vision_units", "text_tokens", "target_tokens", TOKENS)
# A choice: keys may be ids, of which each record has another.
MOST_UNUSED = 100
"""Most kinds of unused things that are told apart."""
FURTHER = "further pictures of an image, of which the first alone is shown"
"""What is unused of an image with several pages or frames."""
ONE_FRAME = "a video of one frame, which is an image"
"""What is surprising of a video, though it is used."""
Fact: TypeAlias = tuple[int, int]
"""Size in bytes and time of the last change in nanoseconds."""
# No file has such a size or time, so one that appears later counts as changed.
_ABSENT: Fact = (-1, -1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkLengths:
    """Lengths in a chunk. Places are relative to its beginning, so that they hold wherever it stands in a file."""

    columns: dict[str, Ints]
    """COLUMNS of each usable sample, [samples]."""
    records: int
    bad: tuple[tuple[Place, str, bool], ...]
    """Place and reason of each record that cannot be used, and whether it shows images or videos."""
    wrong_sizes: int
    """Images whose size in the record is not the file's."""
    images: tuple[tuple[str, Fact], ...]
    """Every image file and video that was asked for its size; one that is not there counts, too."""
    unused: dict[str, tuple[int, Place]]
    """What usable records hold and training does not use: for each kind, the number of records and the first place."""
    tokens: bytes = b""
    """The samples' sealed tokens, framed, as they are written to `token_file`."""
    token_file: TokenFile | None = None
    has_passing_fault: bool = False
    """Whether a record is bad by a PassingFault."""

    def bad_lines(self, file: AnnotationFile, chunk: Chunk) -> Iterator[BadLine]:
        """Yield its unusable records with their places in the file."""
        for place, reason, shows_media in self.bad:
            yield BadLine(path=file.path, place=placed(place, chunk), reason=reason, shows_media=shows_media)

    def holds(self) -> bool:
        """Return whether no image has changed since it was measured."""
        return all(_fact(path) == fact for path, fact in self.images)


def measure(file: AnnotationFile, chunk: Chunk, measurer: Measurer | None, max_tokens: int | None) -> ChunkLengths:
    """Measure a chunk. Raise DataError when the file cannot be read, and for conversations without a `measurer`.

    What is wrong with the model folder or the installation is no fault of a record: raise ModelError for a video that
    the folder's settings cannot prepare, and NoDecoder for one that needs a package which is not there.

    `max_tokens` is for lengths that come without a conversation; a measurer has its own.
    """
    work = _Work(chunk=chunk, measurer=measurer, max_tokens=max_tokens)
    for place, record in formats.records(file, chunk):
        work.take(place, record)
    columns = np.array(work.rows, dtype=np.int64).reshape(-1, len(COLUMNS)).T
    return ChunkLengths(
        columns=dict(zip(COLUMNS, columns, strict=True)),
        records=work.records,
        bad=tuple(work.bad),
        wrong_sizes=work.wrong_sizes,
        images=tuple(work.images.items()),
        unused=work.unused,
        tokens=bytes(work.tokens),
        has_passing_fault=work.has_passing_fault,
    )


def kind_of(what: str, known: Collection[str]) -> str:
    """Return what to count a kind of unused things as: itself, unless there are too many kinds already."""
    return what if what in known or len(known) < MOST_UNUSED else OTHERS


def placed(place: Place, chunk: Chunk) -> Place:
    """Return a place in a file from one that is relative to the beginning of a chunk."""
    return chunk.start + place[0], chunk.line + place[1]


@dataclass(slots=True, kw_only=True)
class _Work:
    chunk: Chunk
    measurer: Measurer | None
    max_tokens: int | None
    rows: list[tuple[int, ...]] = field(default_factory=list)
    tokens: bytearray = field(default_factory=bytearray)
    records: int = 0
    bad: list[tuple[Place, str, bool]] = field(default_factory=list)
    wrong_sizes: int = 0
    images: dict[str, Fact] = field(default_factory=dict)
    unused: dict[str, tuple[int, Place]] = field(default_factory=dict)
    headers: dict[Path, ImageHeader] = field(default_factory=dict)
    """Headers of the images seen so far: datasets ask many questions about one image."""
    clips: dict[Video, Clip] = field(default_factory=dict)
    has_passing_fault: bool = False

    def take(self, place: Place, record: Sample | Measured | BadLine) -> None:
        offset, line = place[0] - self.chunk.start, place[1] - self.chunk.line
        try:
            found = self._measured(record)
        except DataError as error:
            shows_media = isinstance(record, Sample) and bool(record.images or record.videos)
            self.bad.append(((offset, line), in_one_line(str(error)), shows_media))
            self.has_passing_fault = self.has_passing_fault or isinstance(error, PassingFault)
        else:
            lengths = found.lengths
            sizes = (lengths.vision_units, lengths.text_tokens, lengths.target_tokens)
            kind = record.kind if isinstance(record, Sample) else 0
            self.rows.append((offset, line, self.records, kind, *sizes, len(self.tokens) if found.tokens else -1))
            if found.tokens:
                self.tokens += framed(found.tokens)
            for what in dict.fromkeys(kind_of(what, self.unused) for what in found.unused):
                count, first = self.unused.get(what, (0, (offset, line)))
                self.unused[what] = count + 1, first
        self.records += 1

    def _measured(self, record: Sample | Measured | BadLine) -> Measured:
        """Return the lengths of a record, and what it says that training does not use. Raise DataError."""
        match record:
            case BadLine():
                raise DataError(record.reason)
            case Measured():
                return replace(record, lengths=_cut(record.lengths, self.max_tokens))
            case Sample():
                return self._of_sample(record)

    def _of_sample(self, sample: Sample) -> Measured:
        if self.measurer is None:
            raise DataError("the lengths of a conversation depend on the model; give a job file, which names it")
        if sample.videos and (refusal := self.measurer.no_videos):
            raise refusal
        headers = [self._header(image) for image in sample.images]
        sizes = tuple(header.size for header in headers)
        clips = tuple(self._clip(video) for video in sample.videos)
        found = self.measurer.measure(sample, sizes, clips)
        lengths = found.lengths
        if lengths.target_tokens == 0:
            if lengths.text_tokens == self.measurer.max_tokens:
                raise DataError(
                    f"no target token in the first {lengths.text_tokens} that it is cut to; raise data.max_tokens"
                )
            raise DataError("no target tokens: no assistant turn to learn from")
        stated = zip(sample.image_sizes, sizes, strict=True)
        self.wrong_sizes += sum(said is not None and said != real for said, real in stated)
        more = [FURTHER] if any(header.has_more for header in headers) else []
        more += [ONE_FRAME] if any(clip.frames == 1 and not clip.is_file for clip in clips) else []
        return replace(found, unused=(*sample.unused, *found.unused, *more))

    def _header(self, image: Image) -> ImageHeader:
        if isinstance(image, bytes):
            return image_header(image)
        if image not in self.headers:
            self.images[str(image)] = _fact(str(image))  # before it is read: a change in between is then seen as one
            self.headers[image] = image_header(image)
        return self.headers[image]

    def _clip(self, video: Video) -> Clip:
        if isinstance(video.source, Path):
            if video not in self.clips:
                self.images[str(video.source)] = _fact(str(video.source))
                self.clips[video] = clip_of(video, self._header)
            return self.clips[video]
        return clip_of(video, self._header)


def _cut(lengths: Lengths, max_tokens: int | None) -> Lengths:
    """Cut lengths without their text, as if all targets stood at the end."""
    excess = max(0, lengths.text_tokens - max_tokens) if max_tokens is not None else 0
    return replace(
        lengths,
        text_tokens=lengths.text_tokens - excess,
        target_tokens=max(0, lengths.target_tokens - excess),
    )


def _fact(path: str) -> Fact:
    try:
        found = os.stat(path)  # noqa: PTH116 - millions of them
    except (OSError, ValueError):
        return _ABSENT
    return found.st_size, found.st_mtime_ns
