"""Videos that records name, as files, folders or lists of frames."""

import gc
import importlib.util
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.programs.measurers import Words
from tests.values.data import file_of, record, write_records
from trials.data import formats
from trials.data.lengths import ONE_FRAME, measure
from trials.data.records.images import image_header
from trials.data.records.sample import NO_VIDEOS, BadLine, Clip, Lengths, Measured, Sample, Video
from trials.data.records.video_references import MOST_FRAMES
from trials.data.records.videos import clip_of, frames_of, video_pixels
from trials.errors import DataError, ModelError, NoDecoder

FRAMES = ["1.jpg", "2.jpg", "3.PNG"]


class Films(Words):
    """Counts the frames of videos."""

    def measure(self, sample: Sample, image_sizes: Any, clips: tuple[Clip, ...] = ()) -> Measured:
        units = sum(clip.frames for clip in clips)
        return Measured(lengths=Lengths(vision_units=units, text_tokens=3, target_tokens=2))


def sample_of(tmp_path: Path, line: dict[str, Any], name: str = "messages") -> Sample | Measured | BadLine:
    path = write_records(tmp_path / "a.jsonl", line)
    file = file_of(path, format=name)
    ((_, found),) = (each for chunk in formats.chunks(file) for each in formats.records(file, chunk))
    return found


def filmed(text: str, **keys: Any) -> dict[str, Any]:
    return record(text, "A circle.", **keys)


def parts(*content: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(content)}, {"role": "assistant", "content": "A circle."}]}


@pytest.mark.parametrize(
    ("line", "name", "text", "sources"),
    [
        (filmed("<video>\nWhat?", video="a.mp4"), "qwen", "<video>\nWhat?", ["a.mp4"]),
        (filmed("<video> or <video>", video=["a.mp4", "clips/b"]), "qwen", "<video> or <video>", ["a.mp4", "clips/b"]),
        (filmed("<video>What?", video=FRAMES), "qwen", "<video>What?", [FRAMES]),
        (filmed("<image>\nWhat?", video="a.mp4", data_source="x"), "llava", "<video>\nWhat?", ["a.mp4"]),
        (filmed("What?", video="a.mp4"), "llava", "<video>\nWhat?", ["a.mp4"]),
        (filmed("<video><video>", videos=[FRAMES, "a.mp4"]), "llama-factory", "<video><video>", [FRAMES, "a.mp4"]),
        (filmed("<video>", videos=["a.gif"]), "qwen", "<video>", ["a.gif"]),
        (filmed("<video><video>", videos=["a.gif", "b.GIF"]), "qwen", "<video><video>", ["a.gif", "b.GIF"]),
        (filmed("<video>", videos=[["1.gif", "2.gif"]]), "qwen", "<video>", [["1.gif", "2.gif"]]),
        (filmed("A <video> of text"), "qwen", "A <video> of text", []),
        (parts({"type": "video", "video": "file:///x/a.mp4"}), "messages", "<video>", ["/x/a.mp4"]),
        (parts({"type": "video_url", "video_url": {"url": "a.mp4"}}), "messages", "<video>", ["a.mp4"]),
        (parts({"type": "video"}) | {"videos": ["a.mp4"]}, "messages", "<video>", ["a.mp4"]),
    ],
)  # fmt: skip
def test_a_record_names_its_videos(
    tmp_path: Path, line: dict[str, Any], name: str, text: str, sources: list[str | list[str]]
) -> None:
    found = sample_of(tmp_path, line, name)
    assert isinstance(found, Sample), found
    assert found.turns[0].text == text
    expected = [
        tmp_path / each if isinstance(each, str) else tuple(tmp_path / name for name in each) for each in sources
    ]
    assert [video.source for video in found.videos] == expected


def test_images_and_videos_of_a_record_keep_their_places(tmp_path: Path) -> None:
    line = filmed("<image> <video> <image>", video={"video": FRAMES, "sample_fps": "0.5"}, images=["a.png", "b.png"])
    found = sample_of(tmp_path, line, "qwen")
    assert isinstance(found, Sample), found
    assert found.images == (tmp_path / "a.png", tmp_path / "b.png")
    assert found.videos == (Video(source=tuple(tmp_path / name for name in FRAMES), fps=0.5),)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (filmed("<video><video>", video="a.mp4"), "hold 2 <video> but the record names 1 video"),
        (filmed("<video>", video="a.mp4", videos=["b.mp4"]), "videos are given under `video` and `videos`; keep one"),
        (filmed("<video>", video="https://host/a.mp4"), "which is not fetched; download it and name the file"),
        (filmed("<video>", video=7), "neither the name of a video or of a folder of frames, nor a list of frames"),
        (filmed("<video>", video={"video": "a.mp4", "fps": -1}), "`fps` of `video` is -1; write frames per second"),
        (filmed("<video>", video={"video": "a.mp4", "fps": "1e999"}), "`fps` of `video` is '1e999'"),
        (filmed("<video>", video={"video": "a.mp4", "raw_fps": 25}), "a file states its own; leave it out"),
        (filmed("<video>", video={"video": "a.mp4", "video_start": 3}), "has `video_start`, which is not supported"),
        (filmed("<video>", video=["a.jpg"] * (MOST_FRAMES + 1)), f"frames, more than the {MOST_FRAMES} that"),
        (filmed("<video>", video=["a.jpg", "https://host/b.jpg"]), "frame 2 of `video` is the URL"),
    ],
)  # fmt: skip
def test_a_faulty_video_is_reported_with_its_reason(tmp_path: Path, line: dict[str, Any], reason: str) -> None:
    found = sample_of(tmp_path, line, "qwen")
    assert isinstance(found, BadLine)
    assert reason in found.reason


def test_only_turns_of_the_user_show_videos(tmp_path: Path) -> None:
    line = {"messages": [{"role": "assistant", "content": [{"type": "video", "video": "a.mp4"}]}]}
    found = sample_of(tmp_path, line)
    assert isinstance(found, BadLine)
    assert found.reason == "turn 1 contains a video, but only turns of the user may"


# --- frames ---


def folder_of(path: Path, count: int, size: tuple[int, int] = (12, 8)) -> Path:
    path.mkdir()
    for number in range(count):
        Image.new("RGB", size, (number, 0, 0)).save(path / f"frame{number}.png")
    return path


def test_frames_of_a_folder_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "film", 11)
    (folder / "notes.txt").write_text("no frame")
    video = Video(source=folder, fps=3.0)
    assert clip_of(video, image_header) == Clip(frames=11, size=(8, 12), is_file=False, fps=3.0)
    assert [int(frame[0, 0, 0]) for frame in video_pixels(video, [0, 2, 10])] == [0, 2, 10]


def test_hostile_folders_and_frames_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no frames"):
        frames_of(Video(source=tmp_path / "empty"))
    with pytest.raises(DataError, match=r"missing does not exist"):
        clip_of(Video(source=tmp_path / "missing"), image_header)
    folder = folder_of(tmp_path / "film", 3)
    monkeypatch.setattr("trials.data.records.videos.MOST_FRAMES", 2)
    with pytest.raises(DataError, match="has more than 2 entries; leave out some frames"):
        frames_of(Video(source=folder))
    Image.new("RGB", (5, 5)).save(tmp_path / "other.png")
    with pytest.raises(DataError, match="has 5 x 5 pixels, but the first one 12 x 8; make all frames of a video"):
        clip_of(Video(source=(folder / "frame0.png", tmp_path / "other.png")), image_header)


@pytest.mark.parametrize("kind", ["gif", "webp", "png"])
def test_a_frame_that_is_a_video_itself_is_refused(tmp_path: Path, kind: str) -> None:
    pictures = [Image.new("RGB", (12, 8), (60 * number, 0, 0)) for number in range(3)]
    still, film = tmp_path / f"still.{kind}", tmp_path / f"film.{kind}"
    pictures[0].save(still)
    pictures[0].save(film, save_all=True, append_images=pictures[1:])
    assert clip_of(Video(source=(still, still.read_bytes())), image_header).frames == 2
    frames: tuple[Path | bytes, ...] = (film, film.read_bytes())
    for frame in frames:
        with pytest.raises(DataError, match="holds several pictures, of which the first alone would be shown; save it"):
            clip_of(Video(source=(still, frame)), image_header)


def test_videos_of_one_image_are_named_and_kept(tmp_path: Path) -> None:
    folder_of(tmp_path / "film", 2)
    names = ["film/frame0.png", "film/frame1.png"]
    lines = [filmed("<video>", videos=names), filmed("<video>", videos=names[:1]), filmed("<video>", videos=names[1:])]
    file = file_of(write_records(tmp_path / "a.jsonl", *lines), format="qwen")
    (chunk,) = formats.chunks(file)
    found = measure(file, chunk, Films(no_videos=None), None)
    assert found.columns["vision_units"].tolist() == [2, 1, 1]
    assert {what: count for what, (count, _) in found.unused.items()} == {ONE_FRAME: 2}


def test_a_model_without_videos_refuses_the_line_and_a_changed_frame_is_noticed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "film", 3)
    file = file_of(write_records(tmp_path / "a.jsonl", filmed("<video>", video="film")), format="qwen")
    (chunk,) = formats.chunks(file)
    ((_, reason, shows_media),) = measure(file, chunk, Words(no_videos=DataError(NO_VIDEOS)), None).bad
    assert (reason, shows_media) == (NO_VIDEOS, True)
    found = measure(file, chunk, Films(), None)
    assert found.columns["vision_units"].tolist() == [3]
    assert found.holds()
    Image.new("RGB", (12, 9)).save(folder / "frame1.png")
    assert not found.holds()
    found = measure(file, chunk, Films(), None)
    assert "12 x 9" in found.bad[0][1]
    (folder / "frame1.png").unlink()
    assert not found.holds()


def test_a_folder_that_cannot_prepare_videos_is_no_fault_of_the_lines_that_show_them(tmp_path: Path) -> None:
    (chunk,) = formats.chunks(file := file_of(write_records(tmp_path / "a.jsonl", filmed("<video>", video="film"))))
    with pytest.raises(ModelError, match="fps is 0"):
        measure(file, chunk, Words(no_videos=ModelError("fps is 0")), None)
    text = file_of(write_records(tmp_path / "b.jsonl", record("Who?", "Ada.")))
    assert not measure(text, chunk, Words(no_videos=ModelError("fps is 0")), None).bad


# --- files ---

needs_av = pytest.mark.skipif(not importlib.util.find_spec("av"), reason="PyAV is not installed")


def film_of(
    path: Path, count: int = 25, codec: str = "mpeg4", *, flags: str = "", cut: int = 0, lost: int = 0, **options: str
) -> Path:
    """Write frames of 48 x 32 pixels, 10 per second, `cut` of them before 0, without the first `lost` packets."""
    av = pytest.importorskip("av")
    with av.open(str(path), "w", options={"movflags": flags} if flags else {}) as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt, stream.options = 48, 32, "yuv420p", options
        pixels = (np.full((32, 48, 3), 250 // count * number, dtype=np.uint8) for number in range(count))
        frames = (*map(av.VideoFrame.from_ndarray, pixels), None)
        packets = [packet for frame in frames for packet in stream.encode(frame)]
        for packet in packets[lost:]:
            early = int(cut / 10 / packet.time_base)
            packet.pts, packet.dts = packet.pts - early, packet.dts - early
            container.mux(packet)
    return path


@pytest.fixture
def film(tmp_path: Path) -> Path:
    return film_of(tmp_path / "film.mp4")


@needs_av
def test_a_file_is_decoded_where_frames_are_wanted(film: Path) -> None:
    video = Video(source=film, fps=1.0)
    assert clip_of(video, image_header) == Clip(frames=25, size=(32, 48), is_file=True, fps=10.0, wanted_fps=1.0)
    frames = list(video_pixels(video, [0, 7, 7, 24]))
    assert [frame.shape for frame in frames] == [(32, 48, 3)] * 4
    assert np.allclose([frame.mean() for frame in frames], [0, 70, 70, 240], atol=4)


@needs_av
def test_a_file_that_was_decoded_leaves_no_thread(film: Path) -> None:
    """Of its garbage, in a process that is forked before it is collected, such a thread would be waited for."""
    tasks = Path("/proc/self/task")
    gc.disable()
    try:
        before = len(list(tasks.iterdir()))
        assert len(list(video_pixels(Video(source=film), [0, 1]))) == 2
        assert len(list(tasks.iterdir())) == before
    finally:
        gc.enable()


@needs_av
@pytest.mark.parametrize(
    ("name", "writing", "frames", "first"),
    [
        ("a.mp4", {"count": 60, "flags": "frag_keyframe", "g": "10"}, 60, 0),
        ("a.mp4", {"count": 60, "flags": "frag_keyframe+empty_moov", "g": "10"}, 60, 0),
        ("a.mp4", {"count": 60, "codec": "libx264", "bf": "0", "cut": 15}, 45, 15),
        ("a.mp4", {"count": 60, "codec": "libx264", "bf": "2", "cut": 1}, 59, 1),
        ("a.mp4", {"count": 40, "codec": "libx264", "g": "10", "sc_threshold": "0", "lost": 5}, 30, 10),
        ("a.mkv", {"count": 40, "codec": "libx264", "g": "10", "sc_threshold": "0", "lost": 5}, 30, 10),
        ("a.ts", {"count": 40, "codec": "libx264", "g": "10", "sc_threshold": "0", "lost": 5}, 30, 10),
    ],
)  # fmt: skip
def test_as_many_frames_are_counted_as_decode_whatever_the_header_says(
    tmp_path: Path, name: str, writing: dict[str, Any], frames: int, first: int
) -> None:
    """Fragments, a cut without encoding, and a recording that begins between key frames."""
    video = Video(source=film_of(tmp_path / name, **writing))
    assert clip_of(video, image_header).frames == frames
    shown = [frame.mean() for frame in video_pixels(video, range(frames))]
    assert np.allclose(shown, 250 // writing["count"] * np.arange(first, first + frames), atol=4)


def edited(content: bytes, parts: list[tuple[int, int]]) -> bytes:
    """Return an MP4 with parts (frames, first frame), in place of one, in its edit list (ISO 14496-12, 8.6.6)."""
    changed, place = bytearray(content), content.index(b"elst")
    for box in (b"moov", b"trak", b"edts", b"elst"):
        (size,) = struct.unpack_from(">I", content, content.index(box) - 4)
        struct.pack_into(">I", changed, content.index(box) - 4, size + 12 * (len(parts) - 1))
    # Of movie and track, 1,000 and 10,240 units per second.
    entries = b"".join(struct.pack(">IiI", 100 * frames, 1024 * first, 1 << 16) for frames, first in parts)
    changed[place + 8 : place + 24] = struct.pack(">I", len(parts)) + entries
    return bytes(changed)


@needs_av
def test_frames_between_the_parts_of_a_cut_file_are_not_counted(tmp_path: Path) -> None:
    path = film_of(tmp_path / "a.mp4", 60, "libx264", bf="0")
    path.write_bytes(edited(path.read_bytes(), [(10, 0), (15, 25)]))
    assert clip_of(Video(source=path), image_header).frames == 25
    shown = [frame.mean() for frame in video_pixels(Video(source=path), range(25))]
    assert np.allclose(shown, 4 * np.array([*range(10), *range(25, 40)]), atol=4)


@needs_av
def test_a_file_appended_to_a_later_one_is_counted_whole(tmp_path: Path) -> None:
    late, early = film_of(tmp_path / "late.ts", 25, "mpeg2video", cut=-50), film_of(tmp_path / "a.ts", 25, "mpeg2video")
    (tmp_path / "both.ts").write_bytes(late.read_bytes() + early.read_bytes())
    video = Video(source=tmp_path / "both.ts")
    assert clip_of(video, image_header).frames == len(list(video_pixels(video, range(50)))) == 50


@needs_av
def test_a_cover_is_not_taken_for_the_film(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    with av.open(str(tmp_path / "a.mkv"), "w") as container:
        cover, stream = container.add_stream("mjpeg", rate=1), container.add_stream("mpeg4", rate=10)
        cover.width, cover.height, cover.pix_fmt = 16, 16, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for each, count in ((cover, 1), (stream, 30)):
            for _ in range(count):
                pixels = np.zeros((each.height, each.width, 3), dtype=np.uint8)
                container.mux(each.encode(av.VideoFrame.from_ndarray(pixels)))
            container.mux(each.encode())
    video = Video(source=tmp_path / "a.mkv")
    assert clip_of(video, image_header) == Clip(frames=30, size=(32, 48), is_file=True, fps=10.0)
    assert [frame.shape for frame in video_pixels(video, [0, 29])] == [(32, 48, 3)] * 2


MATRICES = [matrix for a in (1, -1) for b in (1, -1) for matrix in ((a, 0, 0, b), (0, a, b, 0))]
"""(a, b, c, d) of a track's matrix (ISO 14496-12, 8.3.2), of quarter turns and mirrors: x' = ax + cy, y' = bx + dy."""


@needs_av
@pytest.mark.parametrize("matrix", MATRICES)
def test_a_file_is_shown_upright_as_its_track_says(tmp_path: Path, matrix: tuple[int, int, int, int]) -> None:
    import av  # noqa: PLC0415 - an extra

    path, stored = tmp_path / "film.mp4", np.zeros((32, 48, 3), dtype=np.uint8)
    stored[:16, :24], stored[:16, 24:], stored[16:, :24], stored[16:, 24:] = 0, 80, 160, 240
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for _ in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(stored)))
        container.mux(stream.encode())
    content = bytearray(path.read_bytes())
    a, b, c, d = matrix
    fixed = (a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    struct.pack_into(">9i", content, content.index(b"tkhd") + 44, *fixed)
    path.write_bytes(content)
    video, upright = Video(source=path), stored.swapaxes(0, 1)[::b, ::c] if b else stored[::d, ::a]
    assert clip_of(video, image_header).size == upright.shape[:2]
    shown = list(video_pixels(video, [0, 2]))
    assert len(shown) == 2
    assert all(np.abs(frame.astype(int) - upright).max() < 40 for frame in shown)


@needs_av
def test_damaged_files_and_playlists_are_refused(film: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ends after 25 frames, before frame 99"):
        list(video_pixels(Video(source=film), [0, 99]))
    (tmp_path / "cut.mp4").write_bytes(film.read_bytes()[:300])
    (tmp_path / "list.m3u8").write_text(f"#EXTM3U\n#EXTINF:1,\n{film}\n#EXT-X-ENDLIST\n")
    (tmp_path / "list.txt").write_text(f"ffconcat version 1.0\nfile {film.name}\n")
    for name in ("cut.mp4", "list.m3u8", "list.txt"):
        with pytest.raises(DataError, match=r"cannot be decoded|in a format that is not read"):
            clip_of(Video(source=tmp_path / name), image_header)


def test_without_a_decoder_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    (tmp_path / "film.mp4").write_bytes(b"film")
    with pytest.raises(NoDecoder, match="pip install av, or give the video as a folder or list of frames, or take the"):
        clip_of(Video(source=tmp_path / "film.mp4"), image_header)
