"""What decides which frames of a video file are shown, and how large they are."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.processing_utils import VideosKwargs

from trials.model.hub import folder_of

FILE = "video_preprocessor_config.json"
_NESTED, _OF_IMAGES = "processor_config.json", "preprocessor_config.json"
"""Files that transformers reads before and after the one of videos alone."""
_IMAGE_KEYS = {"min_pixels", "max_pixels"}
_OF_VIDEOS = re.compile(r"(?!_)(?!.*_(type|class)$).*(fps|frame|pixel|video|edge)", re.IGNORECASE)
"""Keys that are meant for videos, of whatever program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoLimits:
    """The settings of a model folder that decide on the frames of video files."""

    fps: float | None
    """Frames per second that are taken; None where their number alone is set."""
    min_frames: int | None
    max_frames: int | None
    min_pixels: int | None
    max_pixels: int | None
    """Of each prepared frame, or of all frames together; None where a frame is a tile."""
    is_of_frame: bool
    """Whether the bounds on pixels apply to each frame alone."""
    samples: bool
    """Whether the processor of transformers chooses frames where it gets all of them (`do_sample_frames`)."""
    file: str
    """The file that has the settings."""
    read: tuple[str, ...]
    """Keys that decide on frames for this model."""
    unknown: tuple[str, ...]
    """Keys of the file that seem to be meant for videos, and that nothing reads."""

    def __str__(self) -> str:
        frames = _span(self.min_frames, self.max_frames)
        pixels = _span(self.min_pixels, self.max_pixels)
        parts = (
            self.fps and f"{self.fps:g} fps",
            frames and f"{frames} frames",
            pixels and f"{pixels} pixels {'a frame' if self.is_of_frame else 'in all frames together'}",
            f"from {self.file}",
        )
        return ", ".join(part for part in parts if part)


def _span(least: int | None, most: int | None) -> str:
    """Return a span with its highest number, without which there is none."""
    if most is None:
        return ""
    if least is None:
        return f"at most {most:,}"
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"


def settings_of(path: str) -> tuple[str, Mapping[str, Any]]:
    """Return the file with the settings of a model folder's videos, and all its keys, as transformers chooses it."""
    folder = Path(folder_of(path))
    nested = _document(folder / _NESTED).get("video_processor")
    if isinstance(nested, dict):
        return _NESTED, nested
    name = FILE if (folder / FILE).is_file() else _OF_IMAGES
    return name, _document(folder / name)


def _document(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError):  # absent; a folder that cannot be read is refused elsewhere
        return {}
    return document if isinstance(document, dict) else {}


def keys(file: str, stated: Collection[str], defaults: Collection[str]) -> dict[str, tuple[str, ...]]:
    """Return `VideoLimits.read` and `unknown`: `stated` are the keys of the file, `defaults` those that are read."""
    known = {*defaults, *VideosKwargs.__annotations__, *(_IMAGE_KEYS if file == _OF_IMAGES else ())}
    return {
        "read": tuple(key for key in defaults if key == "size" or _OF_VIDEOS.match(key)),
        "unknown": tuple(sorted(key for key in stated if key not in known and _OF_VIDEOS.match(key))),
    }
