"""Video files that were cut off or damaged, and whole ones that look so."""

import struct
from collections.abc import Callable, Container, Iterable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trials.data.records import video_file
from trials.data.records.images import image_header
from trials.data.records.sample import Video
from trials.data.records.video_parts import broken_at
from trials.data.records.videos import clip_of, video_pixels
from trials.errors import DataError

av = pytest.importorskip("av")
NOISE = np.random.default_rng(0).integers(0, 256, (100, 32, 48, 3), dtype=np.uint8)


def film(
    path: Path, times: Iterable[int], codec: str = "mpeg4", *, last: int = 1, sound: int = 0, **options: str
) -> Path:
    """Write frames that are shown at these tenths of a second, the last one for `last` tenths.

    `sound` is the length of an audio stream in tenths of a second.
    """
    with av.open(str(path), "w", container_options=options) as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt, stream.options = 48, 32, "yuv420p", {"g": "5"}
        packets = list[Any]()
        if sound:
            audio = container.add_stream("pcm_s16le", rate=8000, layout="mono")
            for tenth in range(sound):
                silence = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
                silence.sample_rate, silence.pts = 8000, 800 * tenth
                packets += audio.encode(silence)
        stamps = list(times)
        frames = (av.VideoFrame.from_ndarray(NOISE[number]) for number in range(len(stamps)))
        coded = [packet for frame in (*frames, None) for packet in stream.encode(frame)]
        for packet, tenth in zip(coded, stamps, strict=True):
            packet.pts = packet.dts = round(tenth / 10 / packet.time_base)
        if not coded:
            container.start_encoding()
            return path
        coded[-1].duration = round(last / 10 / coded[-1].time_base)
        for packet in sorted(packets + coded, key=lambda each: each.dts * each.time_base):
            container.mux(packet)
    return path


def animated(path: Path, count: int) -> Path:
    pictures = [Image.fromarray(each) for each in NOISE[:count]]
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=[100] * (count - 1) + [9000])
    return path


def counted(path: Path) -> int:
    return clip_of(Video(source=path), image_header).frames


def cut(path: Path, share: float) -> Path:
    """Remove the end of a file, of which this share stays."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    return path


def overwritten(path: Path, first: float, last: float) -> Path:
    """Write noise over a part of a file, from one share of its bytes to another."""
    content = bytearray(path.read_bytes())
    begin, end = int(len(content) * first), int(len(content) * last)
    content[begin:end] = np.random.default_rng(1).integers(0, 256, end - begin, dtype=np.uint8).tobytes()
    path.write_bytes(content)
    return path


def stated(path: Path, seconds: float) -> Path:
    """State another duration in the header of a Matroska file, as recorders do that take it from a clock."""
    content, mark = path.read_bytes(), b"\x44\x89\x88"
    place = content.index(mark) + len(mark)
    path.write_bytes(content[:place] + struct.pack(">d", 1000 * seconds) + content[place + 8 :])
    return path


def appended(path: Path) -> Path:
    path.write_bytes(path.read_bytes() + b"\0 something else")
    return path


STILL = [*range(10), *range(60, 70)]
WHOLE: dict[str, tuple[Callable[[Path], Path], int]] = {
    "longer audio": (lambda at: film(at / "a.mkv", range(20), sound=60), 20),
    "longer audio in an AVI": (lambda at: film(at / "a.avi", range(20), sound=60), 20),
    "a still period": (lambda at: film(at / "a.mkv", STILL), 20),
    "a still end": (lambda at: film(at / "a.mkv", range(20), last=70), 20),
    "a still end, without its index": (lambda at: cut(film(at / "a.mkv", range(20), last=70), 0.99), 20),
    "a still end by the header": (lambda at: stated(film(at / "a.mkv", range(20)), 9.0), 20),
    "a still end of an MP4": (lambda at: film(at / "a.mp4", STILL, last=70), 20),
    "a late begin": (lambda at: film(at / "a.mkv", range(50, 70)), 20),
    "a late begin of an MP4": (lambda at: film(at / "a.mp4", range(50, 70)), 20),
    "no duration": (lambda at: film(at / "a.webm", range(20), "libvpx", live="1"), 20),
    "an index in front": (lambda at: film(at / "a.mkv", range(20), reserve_index_space="500"), 20),
    "fragments": (lambda at: film(at / "a.mp4", STILL, movflags="frag_keyframe+empty_moov"), 20),
    "a GIF": (lambda at: animated(at / "a.gif", 10), 10),
    "MPEG-TS": (lambda at: film(at / "a.ts", STILL, "mpeg2video"), 20),
    "other bytes behind it": (lambda at: appended(film(at / "a.mkv", range(20), sound=60)), 20),
}  # fmt: skip


@pytest.mark.parametrize("kind", WHOLE)
def test_a_whole_file_with_times_of_its_own_is_taken_with_all_of_its_frames(kind: str, tmp_path: Path) -> None:
    make, frames = WHOLE[kind]
    path = make(tmp_path)
    assert counted(path) == len(list(video_pixels(Video(source=path), range(frames)))) == frames


DAMAGED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "Matroska": (lambda at: cut(film(at / "a.mkv", range(60)), 0.5), r"second [123]\.\d to 6\.0"),
    "Matroska with audio": (lambda at: cut(film(at / "a.mkv", range(60), sound=60), 0.5), r"second [123]\.\d to 6\.0"),
    "WebM": (lambda at: cut(film(at / "a.webm", range(60), "libvpx"), 0.5), r"second [123]\.\d to 6\.0"),
    "AVI": (lambda at: cut(film(at / "a.avi", range(60)), 0.5), r"second [123]\.\d to 6\.0"),
    "MP4": (lambda at: cut(film(at / "a.mp4", range(60), movflags="faststart"), 0.5), r"second [123]\.\d to 6\.0"),
    "noise in the middle": (
        lambda at: overwritten(film(at / "a.mkv", range(60), cluster_time_limit="500"), 0.3, 0.6),
        r"second [01]\.\d to [34]\.\d"
    ),
    "noise up to the end": (lambda at: overwritten(film(at / "a.mkv", range(60)), 0.5, 1), r"second [123]\.\d to 6\.0"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_file_that_lacks_more_than_a_second_is_refused(kind: str, tmp_path: Path) -> None:
    make, lost = DAMAGED[kind]
    with pytest.raises(DataError, match=rf"^video \S* has no frames from {lost}; it was cut off or damaged, copy it "):
        counted(make(tmp_path))


@pytest.mark.parametrize(
    ("name", "times", "share", "frames"),
    [
        ("a.mkv", range(60), 0.99, {60}),
        ("a.mkv", range(60), 0.88, range(52, 57)),
        ("a.mkv", range(0, 1000, 50), 0.93, range(17, 20)),
        ("a.avi", range(60), 0.95, range(56, 60)),
    ],
)
def test_the_loss_of_an_index_or_of_a_few_frames_is_no_fault(
    name: str, times: range, share: float, frames: Container[int], tmp_path: Path
) -> None:
    assert counted(cut(film(tmp_path / name, times), share)) in frames


def test_a_file_that_does_not_state_its_end_cannot_be_seen_to_lack_it(tmp_path: Path) -> None:
    assert counted(cut(film(tmp_path / "a.webm", range(60), "libvpx", live="1"), 0.5)) < 40
    assert counted(cut(film(tmp_path / "a.ts", range(60), "mpeg2video"), 0.5)) < 40


def test_a_whole_file_is_not_followed_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its packets are counted already."""
    path = film(tmp_path / "a.mkv", range(60))
    monkeypatch.setattr(video_file, "broken_at", None)
    assert counted(path) == 60


@pytest.mark.parametrize("content", [b"", b"\x1a", b"RIFF", b"\0\0\0\1moov", b"\xff" * 40, bytes(range(256))])
@pytest.mark.parametrize("kind", ["matroska,webm", "avi", "mov,mp4,m4a", "mpegts"])
def test_any_bytes_have_an_end(content: bytes, kind: str) -> None:
    assert (broken_at(BytesIO(content), kind) or 0) <= len(content)


# --- what is no video ---


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: path.write_bytes(b""), "is empty; copy it again"),
        (lambda path: path.write_bytes(b"words " * 99), "cannot be decoded: Invalid data found when processing input"),
        (lambda path: sound(path, "wav"), "holds no video, or is in a format that is not read; save it as MP4"),
        (lambda path: sound(path, "mp4"), "holds no video"),
        (lambda path: Image.new("RGB", (9, 9)).save(path, "JPEG"), "holds no video, or is in a format that is not "),
        (lambda path: film(path.rename(path.with_suffix(".mkv")), ()).rename(path), "has no frames; encode it again"),
    ],
    ids=["empty", "text", "wav", "m4a", "jpg", "no frames"],
)
def test_what_holds_no_frames_is_refused_with_the_reason(
    make: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "film.mp4"
    path.touch()
    make(path)
    with pytest.raises(DataError) as caught:
        counted(path)
    assert str(caught.value).startswith(f"video {path} {reason}")
    assert "Errno" not in str(caught.value)


def sound(path: Path, kind: str) -> None:
    with av.open(str(path), "w", format=kind) as container:
        stream = container.add_stream("pcm_s16le" if kind == "wav" else "aac", rate=8000)
        form = "s16" if kind == "wav" else "fltp"
        silence = av.AudioFrame.from_ndarray(
            np.zeros((1, 8000), np.int16 if kind == "wav" else np.float32), format=form, layout="mono"
        )
        silence.sample_rate = 8000
        container.mux([*stream.encode(silence), *stream.encode()])
