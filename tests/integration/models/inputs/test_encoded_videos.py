"""Encoded samples with videos are those that transformers' own processors make, which need torchvision."""

import importlib.util
import itertools
import json
import re
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from tests.contracts.test_families import TINY
from tests.values.data import write_records
from tests.values.parameters import parameters
from trials import plugins
from trials.data.indexing import build_index
from trials.data.records.images import image_header, image_size
from trials.data.records.sample import IGNORED, IMAGE, VIDEO, Clip, Encoded, Encoder, Lengths, Sample, Turn, Video
from trials.data.records.videos import clip_of
from trials.errors import DataError, ModelError
from trials.job import DataSection, Source
from trials.model.family import load_family
from trials.model.inputs.chat_encoder import ChatEncoder
from trials.model.inputs.encoders import video_limits
from trials.model.skeleton import load_config

KNOWN = Path(__file__).parents[3] / "assets" / "videos.json"
"""What `own` returned with torchvision 0.28 and transformers 5.23 or 5.24, by model and case."""
PROCESSORS = {
    "qwen2-vl": ("Qwen2VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen2-5-vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    "qwen3-vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
    "glm4v": ("Glm4vProcessor", "Glm4vVideoProcessor"),
    "llava-onevision": ("LlavaOnevisionProcessor", "LlavaOnevisionVideoProcessor"),
    "llava-next-video": ("LlavaNextVideoProcessor", "LlavaNextVideoVideoProcessor"),
}
SHORT = ("qwen2-5-vl", "qwen3-vl", "glm4v", "llava-onevision")
"""They differ in how frames are chosen, and in positions and texts of times."""
CASES: dict[str, tuple[tuple[int, ...], ...]] = {
    "one": ((4, 30, 40),),
    "odd, and an image": ((5, 100, 21), (64, 90)),
    "an image before two": ((33, 47), (2, 9, 13), (7, 140, 137)),
}
"""(frames, height, width) of videos and (height, width) of images, in the order of the text."""


@pytest.fixture(scope="module", params=parameters({name: name for name in PROCESSORS}, short=SHORT))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp(name)
    plugins.load(TINY, name).make(made)
    return made


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return load_family(load_config(str(folder))).encoder(str(folder))


def shown(case: str) -> list[tuple[np.ndarray[Any, np.dtype[np.uint8]], float | None]]:
    """Pixels, and frames per second of those that are videos."""
    noise = np.random.default_rng(len(case))
    rates = itertools.cycle((0.7, 2.0, 29.97))
    return [
        (noise.integers(0, 256, (*shape, 3), dtype=np.uint8), next(rates) if len(shape) == 3 else None)
        for shape in CASES[case]
    ]


def sample_of(folder: Path, case: str) -> Sample:
    images, videos, marks = list[Path](), list[Video](), list[str]()
    for number, (pixels, fps) in enumerate(shown(case)):
        frames = pixels if fps else pixels[None]
        paths = tuple(folder / f"{number}-{each}.png" for each in range(len(frames)))
        for path, frame in zip(paths, frames, strict=True):
            Image.fromarray(frame).save(path)
        marks.append(VIDEO if fps else IMAGE)
        if fps:
            videos.append(Video(source=paths, fps=fps))
        else:
            images += paths
    turns = (
        Turn(role="user", text=f"Look {' and '.join(marks)} now"),
        Turn(role="assistant", text="A red circle."),
    )
    return Sample(turns=turns, images=tuple(images), image_sizes=(None,) * len(images), videos=tuple(videos))


def described(tokenizer: Any, ids: Any, positions: Any, grids: Any, pixels: Any) -> dict[str, Any]:
    """Text with runs of a token counted, and figures of the rest: positions [P, tokens], grids and pixels of videos."""
    text = re.sub(r"(<[^<>]*>)\1+", lambda run: f"{run[1]} x {len(run[0]) // len(run[1])}", tokenizer.decode(ids))
    flat = np.asarray(pixels, dtype=np.float64).ravel()
    return {
        "text": text,
        "positions": sha256(np.asarray(positions, dtype="<i8").tobytes()).hexdigest()[:16],
        "grids": np.asarray(grids).tolist(),
        "pixels": [len(flat), *flat[:: len(flat) // 40][:40].round(5).tolist(), round(float(flat.mean()), 5)],
    }


def own(folder: Path, name: str, case: str) -> dict[str, Any]:
    """What transformers' own processor and model make of a sample. Needs torchvision."""
    parts = [getattr(transformers, each) for each in PROCESSORS[name]]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    settings = json.loads((folder / "processor_config.json").read_text())
    films = parts[1].from_pretrained(folder)
    processor = parts[0](image_processor=images, tokenizer=tokenizer, video_processor=films, **settings)
    videos = [(pixels, fps) for pixels, fps in shown(case) if fps]
    pictures = [Image.fromarray(pixels) for pixels, fps in shown(case) if not fps]
    measurer = load_family(load_config(str(folder))).encoder(str(folder))
    assert isinstance(measurer, ChatEncoder)
    text = measurer.measurer.template.rendered(sample_of(folder, case).turns, videos=True)
    of_llava = name.startswith("llava")
    facts = [VideoMetadata(len(pixels), fps=fps, frames_indices=list(range(len(pixels)))) for pixels, fps in videos]
    made = processor(
        text=[text],
        images=[pictures] if pictures else None,
        videos=[pixels for pixels, _ in videos],
        do_sample_frames=False,
        **({"return_tensors": None} if of_llava else {"video_metadata": facts, "return_tensors": "pt"}),
    )
    ids = np.asarray(made["input_ids"])[0]
    if of_llava:
        frames = [np.asarray(each) for each in made["pixel_values_videos"]]
        grids = [[len(each), -1, -1] for each in frames]
        return described(tokenizer, ids, np.arange(len(ids))[None], grids, np.concatenate(frames))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(load_config(str(folder)))
    inputs = {key: made.get(key) for key in ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")}
    positions, _ = model.model.get_rope_index(made["input_ids"], made["mm_token_type_ids"], **inputs)
    return described(tokenizer, ids, positions[:, 0], made["video_grid_thw"], made["pixel_values_videos"])


def found(encoder: Encoder, encoded: Encoded, case: str) -> dict[str, Any]:
    assert isinstance(encoder, ChatEncoder)
    assert encoded.pixel_values is not None
    films = [fps is not None for _, fps in shown(case)]
    units = (
        encoded.grids.prod(1) // 4 if encoded.grids.min() > 0 and len(encoded.positions) == 3 else encoded.grids[:, 0]
    )
    parts = np.split(encoded.pixel_values, np.cumsum(units[:-1]))
    pixels = np.concatenate([part for part, film in zip(parts, films, strict=True) if film])
    tokenizer = encoder.measurer.processor.tokenizer
    return described(tokenizer, encoded.input_ids, encoded.positions, encoded.grids[films], pixels)


@pytest.mark.parametrize("case", CASES)
def test_tokens_positions_grids_pixels_and_lengths_are_those_of_the_real_processor(
    name: str, folder: Path, encoder: Encoder, case: str
) -> None:
    expected = json.loads(KNOWN.read_text())[name][case]
    if importlib.util.find_spec("torchvision"):
        assert own(folder, name, case) == expected
    sample = sample_of(folder, case)
    encoded = encoder.encode(sample, pixels=True)
    made = found(encoder, encoded, case)
    # Another processor may round a pixel to the next of its 256 values.
    np.testing.assert_allclose(made.pop("pixels"), expected.pop("pixels"), atol=0.02)
    assert made == expected
    clips = tuple(clip_of(video, image_header) for video in sample.videos)
    assert encoded.pixel_values is not None
    assert encoder.measure(sample, tuple(map(image_size, sample.images)), clips).lengths == Lengths(
        vision_units=len(encoded.pixel_values),
        text_tokens=len(encoded.input_ids),
        target_tokens=int(np.count_nonzero(encoded.labels != IGNORED)),
    )
    without = encoder.encode(sample, pixels=False)
    assert without.pixel_values is None
    assert np.array_equal(without.input_ids, encoded.input_ids)


def test_a_damaged_frame_is_noticed_without_pixels_too(folder: Path, encoder: Encoder) -> None:
    sample = sample_of(folder, "one")
    path = folder / "0-2.png"
    content = path.read_bytes()
    path.write_bytes(content[:60] + bytes(40) + content[100:])
    for pixels in (True, False):
        with pytest.raises(DataError, match=r"0-2.png cannot be decoded"):
            encoder.encode(sample, pixels=pixels)


def test_frames_of_a_file_are_chosen_as_the_settings_say(name: str, encoder: Encoder) -> None:
    assert isinstance(encoder, ChatEncoder)
    assert encoder.measurer.videos is not None
    clip = Clip(frames=100, size=(30, 40), is_file=True, fps=25.0)
    expected = {
        "qwen2-vl": [0, 12, 25, 37, 50, 62, 75, 87],
        "qwen2-5-vl": [0, 12, 25, 37, 50, 62, 75, 87],
        "qwen3-vl": [0, 14, 28, 42, 57, 71, 85, 99],
        "glm4v": [0, 13, 25, 38, 50, 63, 75, 88],
        "llava-onevision": [number * 100 // 32 for number in range(32)],
        "llava-next-video": [number * 100 // 32 for number in range(32)],
    }
    assert encoder.measurer.videos.chosen(clip).tolist() == expected[name]


def test_what_decides_on_videos_is_told_of_every_model(name: str, encoder: Encoder) -> None:
    limits = video_limits(encoder)
    frames = {"glm4v": "2 fps, at most 600 frames", "llava-onevision": "at most 32 frames"}
    assert str(limits).startswith(frames.get(name.replace("next-video", "onevision"), "2 fps, 4 to 12 frames") + ", ")


@pytest.mark.parametrize("name", ["glm4v"], indirect=True, scope="module")
@pytest.mark.parametrize(
    ("frames", "fps", "wanted"),
    [(100, 25.0, None), (7, 3.1, None), (1, 29.97, None), (40, 2.0, 30.0), (90, 30.0, 7.3), (2000, 5.0, None)],
)
def test_frames_of_a_file_are_those_of_glm(encoder: Encoder, frames: int, fps: float, wanted: float | None) -> None:
    assert isinstance(encoder, ChatEncoder)
    assert encoder.measurer.videos is not None
    clip = Clip(frames=frames, size=(30, 40), is_file=True, fps=fps, wanted_fps=wanted)
    rules = SimpleNamespace(fps=2, max_duration=300)
    facts = VideoMetadata(frames, fps=fps, duration=frames / fps)
    expected = Glm4vVideoProcessor.sample_frames(rules, facts, fps=wanted)
    assert encoder.measurer.videos.chosen(clip).tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl"])
def test_fewer_frames_than_the_least_are_taken_where_no_more_are_allowed(name: str, tmp_path: Path) -> None:
    plugins.load(TINY, name).make(tmp_path)
    rules = {"patch_size": 7, "fps": 2, "max_frames": 2}  # the default of min_frames is 4
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(rules))
    encoder = load_family(load_config(str(tmp_path))).encoder(str(tmp_path))
    assert isinstance(encoder, ChatEncoder)
    assert encoder.measurer.videos is not None
    chosen = encoder.measurer.videos.chosen(Clip(frames=100, size=(30, 40), is_file=True, fps=25.0))
    of_qwen3 = Qwen3VLVideoProcessor.sample_frames(SimpleNamespace(**rules, min_frames=4), VideoMetadata(100, fps=25.0))
    # The module of Qwen2-VL's processor needs torchvision.
    assert chosen.tolist() == {"qwen2-vl": [0, 50], "qwen3-vl": of_qwen3.tolist()}[name]
    assert str(encoder.measurer.videos.limits).startswith("2 fps, 2 frames, ")


@pytest.mark.usefixtures("name")
@pytest.mark.parametrize("name", ["qwen2-vl"], indirect=True, scope="module")
@pytest.mark.parametrize(
    ("clip", "reason"),
    [
        (Clip(frames=13, size=(30, 40), is_file=False), "has 13 frames, more than the 12 that the model takes"),
        (Clip(frames=1, size=(30, 40), is_file=True, fps=25.0), "refuses a video of 1 frames of 40 x 30 pixels"),
        (Clip(frames=4, size=(1, 300), is_file=False), "absolute aspect ratio must be smaller than 200"),
    ],
    ids=["many", "one", "thin"],
)
def test_videos_that_the_processor_refuses_are_errors_of_the_data(encoder: Encoder, clip: Clip, reason: str) -> None:
    assert isinstance(encoder, ChatEncoder)
    assert encoder.measurer.videos is not None
    with pytest.raises(DataError, match=reason):
        encoder.measurer.videos.count(clip)


@pytest.mark.parametrize(
    ("name", "setting", "reason"),
    [
        (
            "qwen2-5-vl",
            {"patch_size": 14},
            r"makes patches of \(size, frames, merged\) \(14, 2, 2\) but the model takes",
        ),
        ("qwen3-vl", {"fps": -1}, "fps for videos is -1; correct it in video_preprocessor_config.json"),
        ("qwen3-vl", {"size": {"shortest_edge": 9, "longest_edge": 1 << 60}}, "longest_edge for videos is 1152921504"),
        (
            "qwen3-vl",
            {"fps": "2"},
            "fps for videos is '2'; correct it in video_preprocessor_config.json to a number",
        ),
        (
            "qwen2-vl",
            {"max_frames": 1},
            "max_frames for videos is 1; correct it in video_",
        ),
        (
            "qwen3-vl",
            {"size": {"shortest_edge": 9, "longest_edge": 8}},
            "shortest_edge for videos is 9 but longest_",
        ),
        ("qwen2-vl", {"size": {"shortest_edge": 1 << 29, "longest_edge": 1 << 30}}, "to at most 178956970 pixels"),
        ("qwen2-vl", {"do_normalize": False}, "do_normalize is false for videos, which is not supported"),
        ("qwen2-vl", {"image_std": [1, 0, 1]}, "are not 3, 3 and 1 numbers of which none divides by 0"),
        ("llava-onevision", {"size": {"height": 384, "width": 384}}, "but the model takes {'height': 30, 'width': 30}"),
        ("llava-next-video", {"size": {"shortest_edge": 20}}, "or a height and width, of at least 28"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("glm4v", {"max_duration": 0}, "max_duration for videos is 0; correct it in video_preprocessor_config"),
                ("llava-next-video", {"crop_size": {"height": 30, "width": 28}}, "the model takes {'height': 28, 'wid"),
                ("llava-next-video", {"size": {"longest_edge": 28}}, "to a shortest_edge, or a height and width, of "),
            )
        ),
    ],
)
def test_wrong_settings_refuse_samples_with_videos_alone(
    tmp_path: Path, name: str, setting: dict[str, Any], reason: str
) -> None:
    plugins.load(TINY, name).make(tmp_path)
    path = tmp_path / "video_preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | setting))
    encoder = load_family(load_config(str(tmp_path))).encoder(str(tmp_path))
    with pytest.raises(ModelError, match=rf"^the data show videos, which this model folder cannot prepare: .*{reason}"):
        encoder.encode(sample_of(tmp_path, "one"), pixels=True)
    with pytest.raises(ModelError, match=reason):
        build_index(job_data(tmp_path, "<video>"), encoder, tmp_path)
    assert len(build_index(job_data(tmp_path, "No video"), encoder, tmp_path)[0]) == 1


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("qwen3-vl", {"fps": -1}),
        ("qwen3-vl", {"patch_size": 14}),
        ("qwen2-vl", {"size": {"shortest_edge": 9, "longest_edge": 8}}),
        ("qwen2-vl", {"do_resize": False}),
        ("qwen2-vl", {"image_std": [1, 0, 1]}),
        ("llava-onevision", {"size": {"height": 384, "width": 384}}),
        ("llava-next-video", {"size": {"shortest_edge": 20}}),
    ],
)
def test_a_wrong_setting_in_the_file_of_all_processors_names_that_file(
    tmp_path: Path, name: str, setting: dict[str, Any]
) -> None:
    plugins.load(TINY, name).make(tmp_path)
    older, whole = tmp_path / "video_preprocessor_config.json", tmp_path / "processor_config.json"
    settings = json.loads(older.read_text()) | setting  # the older file stays, and is not read
    whole.write_text(json.dumps(json.loads(whole.read_text()) | {"video_processor": settings}))
    encoder = load_family(load_config(str(tmp_path))).encoder(str(tmp_path))
    with pytest.raises(ModelError, match=r"; correct (.* in )?video_processor of processor_config.json"):
        encoder.encode(sample_of(tmp_path, "one"), pixels=True)


def test_a_wrong_setting_of_videos_in_a_folder_with_those_of_images_alone_names_their_file(tmp_path: Path) -> None:
    plugins.load(TINY, "qwen2-vl").make(tmp_path)
    (tmp_path / "video_preprocessor_config.json").unlink()
    images = tmp_path / "preprocessor_config.json"
    images.write_text(json.dumps(json.loads(images.read_text()) | {"fps": -1}))
    encoder = load_family(load_config(str(tmp_path))).encoder(str(tmp_path))
    with pytest.raises(ModelError, match=r"fps for videos is -1; correct it in preprocessor_config.json to a number"):
        encoder.encode(sample_of(tmp_path, "one"), pixels=True)


def job_data(folder: Path, question: str) -> DataSection:
    """One record with a question, which may show a video."""
    shown = {"videos": [["0-0.png", "0-1.png"]]} if VIDEO in question else {}
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": "A red circle."}]
    path = write_records(folder / "a.jsonl", {"messages": turns, **shown})
    return DataSection(sources=(Source(path=str(path)),))


def test_a_video_of_too_many_pixels_is_refused(tmp_path: Path) -> None:
    plugins.load(TINY, "qwen2-5-vl").make(tmp_path)
    (tmp_path / "video_preprocessor_config.json").write_text(
        json.dumps({"patch_size": 7, "size": {"shortest_edge": 196, "longest_edge": 1 << 24}})
    )
    encoder = load_family(load_config(str(tmp_path))).encoder(str(tmp_path))
    assert isinstance(encoder, ChatEncoder)
    assert encoder.measurer.videos is not None
    with pytest.raises(DataError, match=r"prepared as 700 frames of \d+ x \d+, \d+ pixels, more than the 178956970"):
        encoder.measurer.videos.count(Clip(frames=700, size=(2160, 3840), is_file=False))
