"""The videos that a record names: by a file, by a folder of frames, or by its frames."""

import math
from pathlib import Path, PurePath
from typing import Any

from trials.data.records.inline_images import is_data_url, is_inline_image
from trials.data.records.record import Record, RecordError
from trials.data.records.references import is_unicode, named_file, picture_of
from trials.data.records.sample import Image, Video
from trials.data.records.watched import is_nothing

# A choice, above the 768 frames that Qwen's processors take at most.
MOST_FRAMES = 4096
"""Most frames of one video that is given as images, and most entries of a folder of frames."""
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")
"""Endings of the names of frames, in lower case."""
_SOURCES = ("video", "video_url", "frames", "url", "path")
"""Keys under which an object names its video, as Qwen and OpenAI write it."""
_RATES = ("sample_fps", "fps", "raw_fps")
_OF_SOURCE = "raw_fps"
"""Rate of what frames were taken from, which no file needs."""
_CUTTING = (
    "video_start", "video_end", "nframes", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels",
    "resized_height", "resized_width",
)  # fmt: skip
"""Options of Qwen's messages for one video, which would change what it shows."""


def videos_of(record: Record, keys: tuple[str, ...], root: Path) -> tuple[Video, ...]:
    """Return the record's videos, names being relative to `root`. An absent or empty key is none. Raise RecordError.

    A list of images is the frames of one video. Any other list holds one video in each entry, also a list of names of
    GIF files, which are rarely frames.
    """
    used = [key for key in keys if not is_nothing(record.get(key))]
    if not used:
        return ()
    if len(used) > 1:
        raise RecordError(f"videos are given under {' and '.join(f'`{key}`' for key in used)}; keep one")
    value, what = record[used[0]], f"`{used[0]}`"
    several = value if isinstance(value, list) and (_are_gifs(value) or not _are_frames(value)) else [value]
    return tuple(video_of(each, what, root) for each in several)


def video_of(value: object, what: str, root: Path) -> Video:
    """Return a video given as a name, as its frames, or as an object with one of them. Raise RecordError."""
    fps, is_of_source = None, False
    # Chats nest them, as in {"video_url": {"url": ...}}.
    while isinstance(value, dict):
        given = value
        if cutting := [key for key in _CUTTING if given.get(key) is not None]:
            raise RecordError(
                f"{what} has `{cutting[0]}`, which is not supported for one video; set what holds for all in the "
                "model's settings of videos (`autotune doctor JOB` names their file), and cut the video itself"
            )
        key, rate = _rate(given, what)
        if rate:
            fps, is_of_source = rate, key == _OF_SOURCE
        sources = [key for key in _SOURCES if not is_nothing(given.get(key))]
        if len(sources) > 1:
            raise RecordError(f"{what} gives its video under {' and '.join(f'`{key}`' for key in sources)}; keep one")
        value = given[sources[0]] if sources else None
    match value:
        case list() if _are_frames(value):
            return Video(source=_frames(value, what, root), fps=fps)
        case str() if value and is_unicode(value) and not is_data_url(value):
            if is_of_source and PurePath(value).suffix:
                raise RecordError(
                    f"`{_OF_SOURCE}` of {what} is the rate of a video whose frames are given as images, and a file "
                    "states its own; leave it out, or write `fps` for the frames per second that are taken"
                )
            return Video(source=named_file(value, what, root), fps=fps)
    raise RecordError(f"{what} is neither the name of a video or of a folder of frames, nor a list of frames")


def _are_frames(values: list[Any]) -> bool:
    return bool(values) and all(_is_frame(value) for value in values)


def _are_gifs(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, str) and PurePath(value).suffix.lower() == ".gif" for value in values)


def _is_frame(value: object) -> bool:
    """Return whether it is an image: content, or the name of one."""
    match value:
        case bytes() | {"bytes": bytes()}:
            return True
        case {"path": str(name)} | {"image": str(name)} | str(name):
            return is_inline_image(name) or PurePath(name).suffix.lower() in IMAGE_SUFFIXES
    return False


def _frames(values: list[Any], what: str, root: Path) -> tuple[Image, ...]:
    if len(values) > MOST_FRAMES:
        raise RecordError(
            f"{what} has {len(values)} frames, more than the {MOST_FRAMES} that are taken; leave some out"
        )
    frames = [picture_of(value, f"frame {number} of {what}", root) for number, value in enumerate(values, 1)]
    if (sized := next((number for number, frame in enumerate(frames, 1) if frame.options), None)) is not None:
        raise RecordError(
            f"frame {sized} of {what} has options of its own, which are not supported; set what holds for all in the "
            "model's settings of videos (`autotune doctor JOB` names their file)"
        )
    return tuple(frame.image for frame in frames)


def _rate(given: dict[str, Any], what: str) -> tuple[str, float | None]:
    """Return the key and the value of the frames per second that an object states, as a number or a text."""
    key = next((key for key in _RATES if given.get(key) is not None), "")
    if not key:
        return key, None
    value = given[key]
    try:
        rate = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        rate = math.nan
    if not 0 < rate <= 1000:
        raise RecordError(f"`{key}` of {what} is {repr(value)[:40]}; write frames per second, above 0, at most 1000")
    return key, rate
