"""What decides which frames of a video file are shown, and how large they are."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trials.model.hub import folder_of

IMAGE_FILE = "preprocessor_config.json"
VIDEO_FILE = "video_preprocessor_config.json"
FILE_OF_ALL = "processor_config.json"
"""Of all processors together, in newer folders with the settings of each."""
VIDEO_PART = "video_processor"
"""Key of the settings of videos in the file of all processors."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoSettings:
    """The settings of videos that a model folder states."""

    file: str
    values: Mapping[str, Any]
    """All keys of the file, or of its part for videos."""

    def __str__(self) -> str:
        return f"{VIDEO_PART} of {self.file}" if self.file == FILE_OF_ALL else self.file


def video_settings(path: str) -> VideoSettings:
    """Return the settings of a model folder's videos, of the file that transformers takes them from."""
    folder = Path(folder_of(path))
    nested = _document(folder / FILE_OF_ALL).get(VIDEO_PART)
    if isinstance(nested, dict):
        return VideoSettings(file=FILE_OF_ALL, values=nested)
    name = VIDEO_FILE if (folder / VIDEO_FILE).is_file() else IMAGE_FILE
    return VideoSettings(file=name, values=_document(folder / name))


def _document(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError):  # absent; a folder that cannot be read is refused elsewhere
        return {}
    return document if isinstance(document, dict) else {}


def _span(least: int | None, most: int | None) -> str:
    """Return a span with its highest number, without which there is none."""
    if most is None:
        return ""
    if least is None:
        return f"at most {most:,}"
    return f"{most:,}" if least == most else f"{least:,} to {most:,}"
