"""Each setting of an image processor is followed, in lengths and pixels, or refused when a model is loaded."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor

from tests.contracts.test_families import TINY
from tests.values.parameters import parameters
from trials import plugins
from trials.data.records.sample import IMAGE, Encoder, Sample, Turn
from trials.errors import ModelError
from trials.job import DataSection, ModelSection, Source
from trials.model.inputs import chat_template
from trials.model.inputs.chat_encoder import ChatEncoder
from trials.model.inputs.encoders import load_encoder
from trials.model.skeleton import load_config

NAMES = (
    *("internvl", "llava", "llava-next", "llava-onevision", "qwen2-5-vl", "glm4v", "gemma3", "idefics3", "mistral3"),
    *("lighton-ocr", "aya-vision", "cohere2-vision", "deepseek-vl", "got-ocr2", "ovis2", "paddleocr-vl", "paligemma"),
)
"""One of the families that share a preparation."""
FILE = "preprocessor_config.json"
SIZES = ((31, 19), (60, 41))
"""(height, width)"""
CHANGES: dict[str, Mapping[str, Any]] = {
    "longest edge": {"size": {"longest_edge": 33}},
    "shortest edge": {"size": {"shortest_edge": 33}},
    "height and width": {"size": {"height": 20, "width": 31}},
    "most height and width": {"size": {"max_height": 40, "max_width": 50}},
    "pixels": {"size": {"min_pixels": 200, "max_pixels": 4000}},
    "size as a number": {"size": 28},
    "no size": {"size": None},
    "edges exchanged": {"size": {"shortest_edge": 5000, "longest_edge": 300}},
    "old bounds": {"min_pixels": 400, "max_pixels": 5000},
    "not resized": {"do_resize": False},
    "not rescaled": {"do_rescale": False},
    "not normalised": {"do_normalize": False},
    "colours not converted": {"do_convert_rgb": False},
    "not padded": {"do_pad": False},
    "padded": {"do_pad": True},
    "cropped": {"do_center_crop": True, "crop_size": {"height": 28, "width": 28}},
    "cropped to nothing": {"do_center_crop": True},
    "not split": {"do_image_splitting": False},
    "panned": {"do_pan_and_scan": True},
    "one deviation": {"image_std": 0.5},
    "one mean": {"image_mean": 0.5},
    "scaled otherwise": {"rescale_factor": 0.01},
    "nearest": {"resample": 0},
    "one frame": {"temporal_patch_size": 1},
    "patches of 3": {"patch_size": 3},
    "unmerged": {"merge_size": 1},
    "fewer tiles": {"max_patches": 1},
    "more tiles": {"min_patches": 3},
    "other resolutions": {"image_grid_pinpoints": [[30, 60]]},
    "smaller tiles": {"max_image_size": {"longest_edge": 10}},
}
SHORT = {
    "internvl": ("fewer tiles", "more tiles", "size as a number", "not normalised", "padded"),
    "llava-next": (
        *("other resolutions", "shortest edge", "size as a number", "cropped", "cropped to nothing", "not padded"),
        "one mean",
    ),
    "qwen2-5-vl": (
        *("pixels", "old bounds", "edges exchanged", "no size", "one frame", "patches of 3", "unmerged"),
        "not resized",
    ),
    "gemma3": ("panned", "height and width", "most height and width", "one deviation", "scaled otherwise", "nearest"),
    "idefics3": (
        *("not split", "smaller tiles", "longest edge", "edges exchanged", "no size", "not rescaled"),
        "colours not converted",
    ),
}
"""Each change of a family that has a rule for it, and of one that follows it where one does"""
NEVER: dict[str, tuple[Mapping[str, Any], str]] = {
    "a huge size": ({"size": {"shortest_edge": 10**9, "longest_edge": 10**9}}, "size of the image processor is"),
    "no length": ({"size": {"height": 0, "width": 0}}, "'height': 0, 'width': 0.*edges in whole numbers from 1"),
    "texts as edges": ({"size": {"shortest_edge": "28", "longest_edge": "90"}}, "'28'.*edges in whole numbers from 1"),
    "another edge": ({"size": {"side": 28}}, "size must have one of"),
    "a word for no": ({"do_resize": "no"}, "do_resize of the image processor is 'no', which has to be true or false"),
    "two means": ({"image_mean": [0.5, 0.5]}, r"image_mean of the image processor is \(0.5, 0.5\), which has to be 3"),
    "no mean": ({"image_mean": None}, "image_mean of the image processor is None, which has to be 3 numbers"),
    "a deviation of 0": ({"image_std": [0.5, 0, 0.5]}, r"image_std of the image processor is \(0.5, 0, 0.5\), .* none"),
    "texts as deviations": (
        {"image_std": ["a", "b", "c"]},
        "image_std of the image processor is .*, which has to be 3",
    ),
    "no scale": ({"rescale_factor": 0}, "rescale_factor of the image processor is 0, which has to be a number other"),
    "a name of a filter": ({"resample": "bicubic"}, "resample of the image processor is 'bicubic', .*Pillow's numbers"),
    "an unknown filter": ({"resample": 99}, "resample of the image processor is 99, which has to be one of Pillow's"),
}


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model: Path = tmp_path_factory.mktemp(request.param)
    plugins.load(TINY, request.param).make(model)
    return model


@pytest.fixture
def changed(folder: Path) -> Callable[[Mapping[str, Any]], Encoder]:
    """Change settings of the folder's image processor until the next change, and load the encoder."""
    file = folder / FILE
    original = folder / "original.json"
    if not original.exists():
        original.write_text(file.read_text())

    def change(settings: Mapping[str, Any]) -> Encoder:
        file.write_text(json.dumps(json.loads(original.read_text()) | settings))
        return load_encoder(ModelSection(path=str(folder)), DataSection(sources=(Source(path="a.jsonl"),)))

    return change


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    images, noise = tmp_path_factory.mktemp("images"), np.random.default_rng(3)
    paths = tuple(images / f"{height}.png" for height, _ in SIZES)
    for path, size in zip(paths, SIZES, strict=True):
        Image.fromarray(noise.integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
    turns = (Turn(role="user", text=f"{IMAGE}What?{IMAGE}"), Turn(role="assistant", text="A red circle."))
    return Sample(turns=turns, images=paths, image_sizes=(None, None))


def processed(encoder: Encoder, folder: Path, sample: Sample) -> tuple[list[int] | None, list[np.ndarray[Any, Any]]]:
    """The tokens, and the units of each image, that the model's own processor makes."""
    config, pictures = load_config(str(folder)), [Image.open(str(path)) for path in sample.images]
    if config.model_type == "internvl":  # whose processor needs torchvision; it shares the tiles among the images
        images = AutoImageProcessor.from_pretrained(str(folder), backend="pil")
        options = {"crop_to_patches": True, "max_patches": max(1, images.max_patches // len(pictures))}
        return None, [images([each], return_tensors="np", **options)["pixel_values"] for each in pictures]
    assert isinstance(encoder, ChatEncoder)
    processor = encoder.measurer.processor
    messages = [{"role": turn.role, "content": list(chat_template.parts(turn))} for turn in sample.turns]
    text = processor.tokenizer.apply_chat_template(
        messages, chat_template=processor.chat_template or processor.tokenizer.chat_template, tokenize=False
    )
    found = processor(images=[pictures], text=[text])
    alone = [processor.image_processor([[each]], **_options(processor))["pixel_values"] for each in pictures]
    if "batch_num_images" in processor.image_processor.model_input_names:  # crops no image of several
        alone = [np.asarray(each) for each in processor.image_processor([pictures])["pixel_values"]]
    return list(found["input_ids"][0]), [np.asarray(each, dtype=np.float32) for each in alone]


def loaded(changed: Callable[[Mapping[str, Any]], Encoder], settings: Mapping[str, Any]) -> Encoder | str:
    """The encoder, or why the model is refused."""
    try:
        return changed(settings)
    except ModelError as error:
        return str(error)


def _options(processor: Any) -> dict[str, Any]:
    cuts = dict(getattr(processor, "images_kwargs", {}))
    return cuts | ({"patch_size": processor.unit_side} if hasattr(processor, "unit_side") else {})


@pytest.mark.parametrize(
    ("folder", "name"),
    parameters(
        {f"{family}, {name}": (family, name) for family in NAMES for name in CHANGES},
        short={f"{family}, {name}" for family, names in SHORT.items() for name in names},
    ),
    indirect=["folder"],
)
def test_a_setting_is_followed_or_refused_when_the_model_is_loaded(
    folder: Path, changed: Callable[[Mapping[str, Any]], Encoder], sample: Sample, name: str
) -> None:
    found = loaded(changed, CHANGES[name])
    if isinstance(found, str):
        assert re.search(r"; (correct|set) .*config\.json", found), found
        return
    encoder = found
    encoded = encoder.encode(sample, pixels=True)
    assert encoded.pixel_values is not None
    lengths = encoder.measure(sample, SIZES).lengths
    assert (lengths.vision_units, lengths.text_tokens) == (len(encoded.pixel_values), len(encoded.input_ids))
    tokens, units = processed(encoder, folder, sample)
    assert tokens in (None, encoded.input_ids.tolist())
    mine, own = np.sort(encoded.pixel_values.ravel()), np.sort(np.concatenate([each.ravel() for each in units]))
    np.testing.assert_array_equal(mine, own)


@pytest.mark.parametrize("name", NEVER)
@pytest.mark.parametrize("folder", parameters({name: name for name in NAMES}, short=("internvl",)), indirect=True)
def test_a_setting_that_makes_no_sense_is_refused_when_the_model_is_loaded(
    changed: Callable[[Mapping[str, Any]], Encoder], name: str
) -> None:
    settings, reason = NEVER[name]
    with pytest.raises(ModelError, match=reason):
        changed(settings)
