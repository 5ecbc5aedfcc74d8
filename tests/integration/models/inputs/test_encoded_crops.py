"""Encoded samples with images are those that the model's own processor makes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.contracts.test_families import TINY
from tests.values.parameters import parameters
from trials import plugins
from trials.data.records.sample import IMAGE, Encoder, Sample, Turn
from trials.errors import DataError
from trials.model.family import load_family
from trials.model.inputs import chat
from trials.model.inputs.processor import load_processor
from trials.model.skeleton import load_config

NAMES = ("llava", "llava-siglip", "vipllava", "llava-next", "llava-next-video", "llava-onevision")
SHORT = ("llava", "llava-next", "llava-onevision")
SIZES = ((1, 1), (1, 100), (100, 1), (28, 28), (30, 61), (90, 31), (200, 333), (57, 29), (500, 20))
SAMPLES = (*((size,) for size in SIZES), SIZES[4:7], SIZES[:4])


@pytest.fixture(scope="module", params=parameters({name: name for name in NAMES}, short=SHORT))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model: Path = tmp_path_factory.mktemp(request.param)
    plugins.load(TINY, request.param).make(model)
    return model


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return load_family(load_config(str(folder))).encoder(str(folder))


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    return load_processor(str(folder), load_config(str(folder)), trust_remote_code=False)


def drawn(folder: Path, sizes: Sequence[tuple[int, int]]) -> Sample:
    """A sample with images of noise of these (height, width)."""
    noise = np.random.default_rng(5)
    folder.mkdir(exist_ok=True)
    images = tuple(folder / f"{height}-{width}.png" for height, width in sizes)
    for path, (height, width) in zip(images, sizes, strict=True):
        Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
    turns = (
        Turn(role="user", text=f"{IMAGE * len(sizes)}What is it?"),
        Turn(role="assistant", text="A red circle."),
    )
    return Sample(turns=turns, images=images, image_sizes=(None,) * len(sizes))


def test_tokens_and_pixels_are_those_of_the_real_processor(
    folder: Path, encoder: Encoder, processor: Any, tmp_path: Path
) -> None:
    template = chat.measurer(str(folder)).template
    for number, sizes in enumerate(SAMPLES):
        sample = drawn(tmp_path / str(number), sizes)
        encoded, text = encoder.encode(sample, pixels=True), template.rendered(sample.turns)
        found = processor(images=[[Image.open(path) for path in sample.images]], text=[text], return_tensors="np")
        assert np.array_equal(encoded.input_ids, found["input_ids"][0]), sizes
        assert encoded.pixel_values is not None
        if "image_sizes" not in found:
            assert np.array_equal(encoded.pixel_values, found["pixel_values"]), sizes
            assert not encoded.grids.size
            continue
        assert np.array_equal(encoded.grids[:, 1:], found["image_sizes"]), sizes
        units = np.split(encoded.pixel_values, np.cumsum(encoded.grids[:-1, 0]))
        for mine, own in zip(units, found["pixel_values"], strict=True):
            assert np.array_equal(mine, own[: len(mine)]), sizes
            assert not own[len(mine) :].any()  # the processor fills up to the most crops


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("llava", ((1, 240_000),)), ("llava-onevision", ((1, 14_000), (28, 28)))],
    ids=["resized by its shorter side", "padded to a square"],
)
def test_an_image_whose_preparation_takes_too_much_memory_is_refused_by_all_that_read_it(
    name: str, sizes: Sequence[tuple[int, int]], tmp_path: Path
) -> None:
    plugins.load(TINY, name).make(tmp_path)
    encoder = load_family(load_config(str(tmp_path))).encoder(str(tmp_path))
    sample = drawn(tmp_path, sizes)
    refused = r"image of \d+ x 1 pixels would be prepared as one of \d+ pixels, more than"
    with pytest.raises(DataError, match=refused):
        encoder.measure(sample, tuple(sizes))
    for pixels in (True, False):  # the first pipeline stage, which has the images, and the last, which has the labels
        with pytest.raises(DataError, match=refused):
            encoder.encode(sample, pixels=pixels)
