"""Samples as records of other trainers, with their images and videos as files."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import ExportError
from trials.data.index import DatasetIndex
from trials.data.records.sample import Image, Sample, Video

_ENDINGS = {b"\x89PNG": ".png", b"\xff\xd8": ".jpg", b"GIF8": ".gif", b"RIFF": ".webp", b"BM": ".bmp"}
"""Ending of a file by the first bytes of an image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """The files of a sample's images and videos; images that records hold themselves are written as files."""

    folder: Path
    """Where they are written: `images` in it, with names by their content."""
    written: set[str] = field(default_factory=set)

    def of(self, image: Image) -> str:
        """Return the path of an image: absolute, or relative to the exported folder where it is in that."""
        if isinstance(image, Path):
            return str(image.absolute())
        ending = next((end for begin, end in _ENDINGS.items() if image.startswith(begin)), ".img")
        name = f"images/{hashlib.sha256(image).hexdigest()[:24]}{ending}"
        if name not in self.written:
            (self.folder / "images").mkdir(exist_ok=True)
            (self.folder / name).write_bytes(image)
            self.written.add(name)
        return name

    def of_video(self, video: Video) -> str | list[str]:
        if isinstance(video.source, Path):
            return str(video.source.absolute())
        return [self.of(frame) for frame in video.source]


def checked_sample(index: DatasetIndex, row: int) -> Sample:
    """Return a sample. Raise ExportError for one that no other trainer is told to prepare as it is here."""
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
