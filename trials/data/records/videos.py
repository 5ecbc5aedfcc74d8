"""Videos: frames and sizes from headers, and pixels."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trials.data.records import video_file
from trials.data.records.faults import unreadable
from trials.data.records.images import ImageHeader, image_pixels
from trials.data.records.sample import Clip, Image, Video
from trials.data.records.video_references import IMAGE_SUFFIXES, MOST_FRAMES
from trials.errors import DataError, shown_name

_NUMBER = re.compile(r"(\d+)")


def frames_of(video: Video) -> tuple[Image, ...] | None:
    """Return the frames of a video that is given as images, in order; None for a file that has to be decoded.

    Those of a folder are its images in the order of their names, in which numbers count by their value. Raise DataError
    for a video that does not exist, and for a folder without an image or with too many entries.
    """
    if isinstance(video.source, tuple):
        return video.source
    try:
        if not video.source.is_dir():
            return None
        with os.scandir(video.source) as entries:
            names = [entry.name for entry in islice(entries, MOST_FRAMES + 1)]
    except OSError as error:
        raise unreadable(f"video {shown_name(video.source)} cannot be opened: {error.strerror}", error) from error
    if len(names) > MOST_FRAMES:
        raise DataError(
            f"the folder {shown_name(video.source)} has more than {MOST_FRAMES} entries; leave out some frames"
        )
    frames = sorted((name for name in names if Path(name).suffix.lower() in IMAGE_SUFFIXES), key=_by_number)
    if not frames:
        raise DataError(
            f"the folder {shown_name(video.source)} holds no frames; their names end in {', '.join(IMAGE_SUFFIXES)}"
        )
    return tuple(video.source / name for name in frames)


def clip_of(video: Video, header_of: Callable[[Image], ImageHeader]) -> Clip:
    """Return what headers say of a video; `header_of` returns that of a frame that is an image.

    Raise DataError for a video that cannot be read, for frames of several sizes, and for a frame that is animated.
    """
    frames = frames_of(video)
    if frames is None:
        assert isinstance(video.source, Path)
        return video_file.clip_of(video.source, video.fps)
    size = header_of(frames[0]).size
    for frame in frames:
        header = header_of(frame)
        if (other := header.size) != size:
            raise DataError(
                f"{_frame(frame)} has {other[1]} x {other[0]} pixels, but the first one {size[1]} x {size[0]}; make "
                "all frames of a video equally large"
            )
        if header.has_more:
            raise DataError(
                f"{_frame(frame)} holds several pictures, of which the first alone would be shown; save it as a video, "
                "such as MP4, and name that in its place"
            )
    return Clip(frames=len(frames), size=size, is_file=False, fps=video.fps)


def _frame(frame: Image) -> str:
    return f"frame {shown_name(frame) if isinstance(frame, Path) else 'in the record'} of a video"


def video_pixels(video: Video, chosen: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield pixels [height, width, 3] in RGB of the frames with these numbers, in ascending order.

    One frame is in memory at a time. Raise DataError for frames that cannot be decoded.
    """
    frames = frames_of(video)
    if frames is None:
        assert isinstance(video.source, Path)
        yield from video_file.pixels_of(video.source, chosen)
    else:
        yield from (image_pixels(frames[number]) for number in chosen)


def _by_number(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name)]
