"""Video files, read with PyAV: header and frames, upright as the file states it."""

import errno
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pillow

from trials.data.records.faults import unreadable
from trials.data.records.images import MOST_PIXELS, on_white
from trials.data.records.sample import Clip
from trials.data.records.video_parts import broken_at
from trials.errors import DataError, NoDecoder, PassingFault, shown_name
from trials.regular_file import check_regular
from trials.units import number_of

_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,asf,ogg,gif"
"""Formats that consist of one file. Others, such as playlists, name further files or addresses that would be opened."""
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
"""Decoders that also decode the alpha of a WebM, by the usual ones, which leave it out."""
_MOST_PACKETS = 10_000_000
"""Most packets that are counted where the header alone does not say the number of frames."""
_ROUNDED_FRAMES = 0.1
"""By how many frames a stated duration may differ from the stated number: edit lists round to milliseconds or so."""
# Choices: shorter gaps hardly change what a video shows, and muxers round durations or include those of audio.
_GAP_SECONDS, _GAP_FRAMES = 1.0, 3
"""How long a damaged file may lack frames: in seconds, and in frames of its mean rate."""


def clip_of(path: Path, wanted_fps: float | None) -> Clip:
    """Return what the header says of a video file, of which the first frame alone is decoded.

    Raise DataError for a missing or damaged file, and for one without a video, and NoDecoder without PyAV.
    """
    with _opened(path) as (container, stream):
        rate = stream.average_rate or stream.guessed_rate
        size = stream.codec_context.height, stream.codec_context.width
        first = next(_decoded(path, container, stream), None)
        if first is None:
            raise _without_frames(path)
        frames, turns = _shown(path, container, stream, first, rate), _turns(first)
    if frames < 1 or min(size) < 1 or not rate or rate <= 0:
        raise DataError(
            f"{_video(path)} has {frames} frames of {size[1]} x {size[0]} pixels at {rate or 0} frames per second; "
            "encode it again"
        )
    if size[0] * size[1] > MOST_PIXELS:
        raise DataError(f"{_video(path)} has frames of more than {MOST_PIXELS} pixels; scale it down")
    upright = size[::-1] if turns % 2 else size
    return Clip(frames=frames, size=upright, is_file=True, fps=float(rate), wanted_fps=wanted_fps)


def _shown(path: Path, container: Any, stream: Any, first: Any, rate: Any) -> int:
    """Return how many frames will be decoded: by the header where duration and first frame agree, else by packets.

    Headers of Matroska and WebM state no number. That of a fragmented MP4 is of its first fragment alone, and that of
    an MP4 that was cut without encoding counts the frames that its edit list hides. Raise DataError for a file that was
    cut off.
    """
    if stream.frames and stream.duration and rate and first.pts == stream.start_time:
        stated = float(stream.duration * stream.time_base * rate)
        is_stated = abs(stream.frames - stated) < _ROUNDED_FRAMES
        # The parts of an AVI whose header agrees with itself are there: FFmpeg scales the duration of a file cut off.
        if is_stated and ("mp4" not in container.format.name or _broken_at(path, container) is None):
            return int(stream.frames)
    return _packets(path, first.pts, rate)


def _packets(path: Path, first_pts: int | None, rate: Any) -> int:
    """Return how many packets are shown; the first frame that decodes is shown at `first_pts`.

    Raise DataError for a damaged file that lacks some in a row.
    """
    shown = key_frames = 0
    with _opened(path) as (container, stream):
        gaps = _Gaps(tick=float(stream.time_base))
        for _, packet in zip(range(_MOST_PACKETS), container.demux(stream), strict=False):
            key_frames += packet.is_keyframe
            # Decoders begin at a key frame, and leave out what is stored behind the first one but shown before it.
            # Behind the next one, earlier times are those of a file that was appended.
            is_early = key_frames < 2 and None not in (packet.pts, first_pts) and packet.pts < first_pts
            shown += packet.size > 0 and not packet.is_discard and not is_early
            gaps.add(packet)
        gaps.end(_stated_end(container, stream, rate))
        if gaps.found and (place := _broken_at(path, container)) is not None:
            gaps.check(path, place, shown)
    return shown


def _stated_end(container: Any, stream: Any, rate: Any) -> float:
    """Return the second at which the stream ends by the header, 0 where it does not say."""
    if container.format.name == "avi":  # whose duration FFmpeg scales to the bytes that are there
        return float(stream.frames / rate) if rate else 0.0
    if stream.duration:
        return float(stream.duration * stream.time_base)
    return (container.duration or 0) / 1_000_000


def _broken_at(path: Path, container: Any) -> int | None:
    with path.open("rb") as file:
        return broken_at(file, container.format.name)


@dataclass(slots=True, kw_only=True)
class _Gaps:
    """Times without packets. Whole files have them, too: long still periods, and audio that ends later."""

    tick: float
    """Seconds of a unit of time."""
    found: list[tuple[int, float, float, int]] = field(default_factory=list)
    """Place in the file of the last packet before each, seconds of its begin and end, and place of the next packet."""
    place: int = 0
    """Of the latest packet."""
    shown_until: float | None = None
    """In seconds."""

    def add(self, packet: Any) -> None:
        """Note when a packet is shown."""
        stamp = packet.dts if packet.pts is None else packet.pts
        if packet.size and stamp is not None:
            self._note(stamp * self.tick, packet.pos or 0)
            until = (stamp + (packet.duration or 0)) * self.tick
            self.shown_until = max(until, until if self.shown_until is None else self.shown_until)

    def end(self, second: float) -> None:
        """Note the end that the file states."""
        self._note(second, sys.maxsize)

    def _note(self, second: float, place: int) -> None:
        if self.shown_until is not None and second - self.shown_until > _GAP_SECONDS:
            self.found.append((self.place, self.shown_until, second, place))
        self.place = place

    def check(self, path: Path, broken: int, frames: int) -> None:
        """Raise DataError for a gap of more than a few of the `frames` where the file is broken."""
        of_frame = (self.shown_until or 0.0) / frames if frames else 0.0
        for before, begin, end, after in self.found:
            if before <= broken <= after and end - begin > _GAP_FRAMES * of_frame:
                raise DataError(
                    f"{_video(path)} has no frames from second {begin:.1f} to {end:.1f}; it was cut off or damaged, "
                    "copy it again"
                )


def pixels_of(path: Path, chosen: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield pixels [height, width, 3] of the frames with these numbers, in ascending order; a number may repeat.

    Transparent ones are on white. Raise DataError where the file cannot be decoded up to the last one.
    """
    wanted = iter(chosen)
    number = next(wanted, None)
    seen, is_mirrored = 0, None
    with _opened(path) as (container, stream):
        from av.video.reformatter import VideoReformatter  # noqa: PLC0415 - see `_opened`

        # One of a frame would live as long as the frame, until its garbage is collected, and its threads with it.
        reformatter = VideoReformatter()
        size = stream.codec_context.height, stream.codec_context.width
        for seen, frame in enumerate(_decoded(path, container, stream), 1):
            while number == seen - 1:
                if (frame.height, frame.width) != size:
                    raise DataError(f"frames of {_video(path)} have several sizes; encode it again")
                if is_mirrored is None:  # of the first alone: a frame and its side data name each other
                    is_mirrored = _is_mirrored(frame)
                pixels = _pixels(frame, reformatter, has_alpha=_has_alpha(container, stream, frame))
                yield np.ascontiguousarray(np.rot90(pixels[::-1] if is_mirrored else pixels, _turns(frame)))
                number = next(wanted, None)
            if number is None:
                return
    raise DataError(
        f"{_video(path)} ends after {number_of(seen, 'frame')}, before frame {number}; it was cut off, or its header "
        "is wrong"
    )


def _decoded(path: Path, container: Any, stream: Any) -> Iterator[Any]:
    """Yield all frames, with their alpha where there is one."""
    name = _ALPHA_DECODERS.get(stream.codec_context.name) if stream.metadata.get("alpha_mode") == "1" else None
    if name is None:
        yield from container.decode(stream)
        return
    import av  # noqa: PLC0415 - see `_opened`

    if name not in av.codecs_available:
        raise PassingFault(
            f"{_video(path)} has transparent areas, which need a build of PyAV with {name}; lay it on a ground, "
            "and encode it again"
        )
    decoder: Any = av.CodecContext.create(name, "r")
    decoder.extradata = stream.codec_context.extradata
    for packet in container.demux(stream):
        yield from decoder.decode(packet)


def _has_alpha(container: Any, stream: Any, frame: Any) -> bool:
    # The fourth byte of uncompressed pixels in an AVI means nothing.
    is_unused = stream.codec_context.name == "rawvideo" and container.format.name == "avi"
    return not is_unused and any(component.is_alpha for component in frame.format.components)


def _turns(frame: Any) -> int:
    """Return the quarter turns, against the clock, that make a frame upright."""
    return int(round(frame.rotation / 90) % 4)


def _is_mirrored(frame: Any) -> bool:
    """Return whether the display matrix of a frame exchanges top and bottom before it turns."""
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return False
    a, b, _, c, d, *_ = np.frombuffer(matrix, dtype=np.int32).tolist()
    return bool(a * d < b * c)


def _pixels(frame: Any, reformatter: Any, *, has_alpha: bool) -> NDArray[np.uint8]:
    colours: NDArray[np.uint8] = reformatter.reformat(frame, format="rgb24").to_ndarray()
    if not has_alpha:
        return colours
    picture = Pillow.fromarray(colours)
    with_alpha = reformatter.reformat(frame, format="rgba").to_ndarray()
    picture.putalpha(Pillow.fromarray(np.ascontiguousarray(with_alpha[..., 3])))
    return on_white(picture)


def _video(path: Path) -> str:
    return f"video {shown_name(path)}"


def _without_frames(path: Path) -> DataError:
    return DataError(f"{_video(path)} has no frames; encode it again")


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """Yield (container, the video stream that FFmpeg prefers).

    Raise DataError for what PyAV raises, and NoDecoder without it.
    """
    try:
        if not check_regular(path):
            raise DataError(f"{_video(path)} is empty; copy it again")
        import av  # noqa: PLC0415 - an extra, and slow to load
    except FileNotFoundError:
        raise DataError(f"{_video(path)} does not exist") from None
    except OSError as error:
        raise unreadable(f"{_video(path)} cannot be opened: {error.strerror or error}", error) from error
    except ImportError as error:
        raise NoDecoder(
            f"{_video(path)} is a file, which needs the package av to be decoded; pip install av, "
            "or give the video as a folder or list of frames, or take the records with video files out of the data"
        ) from error
    try:
        with path.open("rb") as file, _container(path, file) as container:
            # Not the first one, which may be a cover.
            stream = container.streams.best("video")
            if stream is None:
                raise DataError(f"{_video(path)} holds no video")
            yield container, stream
    except av.error.EOFError:
        raise _without_frames(path) from None
    except (av.FFmpegError, ValueError) as error:  # some have the number of an error of the system, for damaged content
        what = getattr(error, "strerror", None) or error
        raise DataError(f"{_video(path)} cannot be decoded: {what}") from error
    except OSError as error:
        raise unreadable(f"{_video(path)} cannot be decoded: {error.strerror or error}", error) from error


def _container(path: Path, file: IO[bytes]) -> Any:
    """Return the container of an opened file in a known format: FFmpeg's playlists could name other files, addresses.

    Raise DataError for any other format.
    """
    import av  # noqa: PLC0415 - see `_opened`

    try:
        return av.open(file, options={"format_whitelist": _FORMATS})
    except av.FFmpegError as error:
        if error.errno != errno.EINVAL:
            raise
        raise DataError(f"{_video(path)} holds no video, or is in a format that is not read; save it as MP4") from error
