"""Samples as records of other trainers, with their images and videos as files."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import ExportError
from trials.data.epoch import Epoch
from trials.data.index import DatasetIndex
from trials.data.records.sample import Image, Sample, Video

_ENDINGS = {b"\x89PNG": ".png", b"\xff\xd8": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}
"""Ending of a file by the first bytes of an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """The files of a sample's images and videos; images that records hold themselves are written as files."""

    folder: Path
    """Where they are written: `images` in it, with names by their content."""
    prefix: Path | None = None
    """Folder by which files in it are named, where the trainer does not start inside of it."""
    written: set[str] = field(default_factory=set)

    def of(self, image: Image) -> str:
        """Return the path of an image; without a prefix, one that is written is named from the folder on."""
        if isinstance(image, Path):
            return str(image.absolute())
        ending = next((end for begin, end in _ENDINGS.items() if image.startswith(begin)), ".img")
        name = f"images/{hashlib.sha256(image).hexdigest()[:24]}{ending}"
        if name not in self.written:
            (self.folder / "images").mkdir(exist_ok=True)
            (self.folder / name).write_bytes(image)
            self.written.add(name)
        return name if self.prefix is None else str(self.prefix / name)

    def of_video(self, video: Video) -> str | list[str]:
        if isinstance(video.source, Path):
            return str(video.source.absolute())
        return [self.of(frame) for frame in video.source]


def checked_sample(index: DatasetIndex, row: int) -> Sample:
    """Return a sample. Raise ExportError for settings of its images or videos that no other trainer reads."""
    sample = index.sample(row)
    if any(option is not None for option in sample.image_options):
        raise ExportError(
            f"{index.where(row)}: an image has a size of its own in the record, which the exported data cannot hold, "
            "so that the trainer would count other tokens; resize the image and take the options out of the record"
        )
    if any(video.fps is not None for video in sample.videos):
        raise ExportError(
            f"{index.where(row)}: a video has frames per second of its own in the record, which the exported data "
            "cannot hold; take them out of the record, or leave the sample out"
        )
    return sample


def messages(sample: Sample) -> Iterator[dict[str, Any]]:
    """Yield the turns as `role` and `content`, with `loss: false` for answers that are not learnt."""
    for turn in sample.turns:
        learnt = {} if turn.is_learnt or turn.role != "assistant" else {"loss": False}
        yield {"role": turn.role, "content": turn.text, **learnt}


def has_unlearnt(sample: Sample) -> bool:
    """Return whether the loss leaves an answer out."""
    return any(turn.role == "assistant" and not turn.is_learnt for turn in sample.turns)


def human_and_gpt(
    index: DatasetIndex, row: int, media: Media, images: str, videos: str, *, holds_prompt: bool = False
) -> dict[str, Any]:
    """Return a sample with turns `from` human and gpt, and its files under these keys.

    With `holds_prompt` the first turn is its system prompt, null where it has none. Raise ExportError for one without,
    or an answer without loss, which such records cannot have.
    """
    sample = checked_sample(index, row)
    prompts = [turn.text for turn in sample.turns if turn.role == "system"]
    if has_unlearnt(sample) or (prompts and not holds_prompt):
        raise ExportError(
            f"{index.where(row)}: a system prompt, or an answer without loss, which records of this trainer do "
            "not have; take it out, or export to ms-swift"
        )
    if any(not (isinstance(video.source, Path) and video.source.is_file()) for video in sample.videos):
        raise ExportError(
            f"{index.where(row)}: frames of a video, in place of which this trainer would train on another sample; "
            "name a video file, give the frames as images, or export to ms-swift"
        )
    names = {"user": "human", "assistant": "gpt"}
    turns: list[dict[str, str | None]] = [{"from": "system", "value": prompts[0] if prompts else None}] * holds_prompt
    turns += [{"from": names[turn.role], "value": turn.text} for turn in sample.turns if turn.role != "system"]
    record: dict[str, Any] = {"conversations": turns}
    if sample.images:
        record[images] = [media.of(image) for image in sample.images]
    if sample.videos:
        record[videos] = [media.of_video(video) for video in sample.videos]
    return record


def numbered(epoch: Epoch) -> Iterator[int]:
    """Yield the numbers of the packs row by row over the data ranks; micro-batches with fewer samples come last."""
    most = int(epoch.packs.counts.max())
    rows = epoch.assignment.tolist()
    if epoch.packs.padded:
        rows.sort(key=lambda row: min(epoch.packs.counts[row]) < most)
    for row in rows:
        yield from row
