"""Images whose record wants a size of its own are prepared as the model's processor prepares them with that size."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from tests.contracts.test_families import TINY
from tests.values.parameters import examples, parameters
from trials import plugins
from trials.data.records.sample import IMAGE, Encoder, ImageOptions, Sample, Turn
from trials.errors import DataError
from trials.model.family import load_family
from trials.model.inputs.processor import load_processor
from trials.model.skeleton import load_config

QWEN = ("qwen2-vl", "qwen2-5-vl", "qwen3-vl", "qwen3-vl-moe")
OTHERS = sorted({*plugins.names(TINY)} - {*QWEN, "text", "text-capped", "text-experts"})
SIDE = 14
"""Pixels of a side of a merged patch of the tiny models."""


def made(folder: Path, name: str) -> Path:
    plugins.load(TINY, name).make(folder)
    return folder


def encoder_of(folder: Path) -> Encoder:
    return load_family(load_config(str(folder))).encoder(str(folder))


@pytest.fixture(scope="module", params=parameters({name: name for name in QWEN}, short=("qwen3-vl",)))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return encoder_of(folder)


@pytest.fixture(scope="module")
def images(folder: Path) -> Any:
    return load_processor(str(folder), load_config(str(folder)), trust_remote_code=False).image_processor


def sample_of(folder: Path, *images: tuple[tuple[int, int], ImageOptions | None]) -> Sample:
    random = np.random.default_rng(7)
    paths = tuple(folder / f"{number}.png" for number in range(len(images)))
    for path, ((height, width), _) in zip(paths, images, strict=True):
        Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
    return Sample(
        turns=(Turn(role="user", text=IMAGE * len(images)), Turn(role="assistant", text="A red circle.")),
        images=paths,
        image_sizes=(None,) * len(images),
        image_options=tuple(options for _, options in images),
    )


def processed(images: Any, path: Any, options: ImageOptions | None) -> Any:
    """What the processor makes of one image when it is called with the options."""
    picture: Image.Image = Image.open(path)
    bounds = images.size
    if options is None:
        return images([picture], return_tensors="np")
    if options.resized_height and options.resized_width:
        # As in `fetch_image` of qwen-vl-utils; the processor is told not to resize then.
        height, width = smart_resize(
            options.resized_height,
            options.resized_width,
            factor=SIDE,
            min_pixels=4 * SIDE**2,
            max_pixels=16384 * SIDE**2,
        )
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
        return images([picture], do_resize=False, return_tensors="np")
    size = {
        "shortest_edge": options.min_pixels or bounds["shortest_edge"],
        "longest_edge": options.max_pixels or bounds["longest_edge"],
    }
    return images([picture], size=size, return_tensors="np")


sizes = st.tuples(st.integers(1, 150), st.integers(1, 150))
bounds = st.integers(SIDE**2, 80 * SIDE**2)
both = st.tuples(bounds, bounds).map(sorted)
wishes = st.one_of(
    st.none(),
    both.map(lambda pair: ImageOptions(min_pixels=pair[0], max_pixels=pair[1])),
    bounds.map(lambda most: ImageOptions(max_pixels=most)),
    st.integers(1, 40 * SIDE**2).map(lambda fewest: ImageOptions(min_pixels=fewest)),
    sizes.map(lambda size: ImageOptions(resized_height=size[0], resized_width=size[1])),
)


@settings(max_examples=examples(25))
@given(shown=st.lists(st.tuples(sizes, wishes), min_size=1, max_size=3))
def test_lengths_pixels_and_grids_are_those_of_the_processor_with_the_same_options(
    folder: Path, encoder: Encoder, images: Any, shown: list[tuple[tuple[int, int], ImageOptions | None]]
) -> None:
    sample = sample_of(folder, *shown)
    expected = [processed(images, path, options) for path, (_, options) in zip(sample.images, shown, strict=True)]
    encoded = encoder.encode(sample, pixels=True)
    assert encoded.pixel_values is not None
    values = np.concatenate([each["pixel_values"] for each in expected])
    np.testing.assert_array_equal(encoded.pixel_values.reshape(values.shape), values)
    np.testing.assert_array_equal(encoded.grids, np.concatenate([each["image_grid_thw"] for each in expected]))
    lengths = encoder.measure(sample, tuple(size for size, _ in shown)).lengths
    assert (lengths.vision_units, lengths.text_tokens) == (len(encoded.pixel_values), len(encoded.input_ids))
    token = load_config(str(folder)).image_token_id
    assert np.count_nonzero(encoded.input_ids == token) == lengths.vision_units


@pytest.mark.parametrize(
    ("size", "options", "reason"),
    [
        ((900, 900), ImageOptions(min_pixels=20_000), "give it both min_pixels and max_pixels"),
        ((20, 20), ImageOptions(resized_height=1, resized_width=900), "refuses an image of 900 x 1 pixels"),
    ],
)
def test_a_size_that_the_model_contradicts_is_refused(
    folder: Path, encoder: Encoder, size: tuple[int, int], options: ImageOptions, reason: str
) -> None:
    sample = sample_of(folder, (size, options))
    for work in (lambda: encoder.measure(sample, (size,)), lambda: encoder.encode(sample, pixels=True)):
        with pytest.raises(DataError, match=reason):
            work()


@pytest.mark.parametrize("name", parameters({name: name for name in OTHERS}, short=("internvl", "llava-next", "glm4v")))
def test_models_that_prepare_all_images_by_one_rule_refuse_options(tmp_path: Path, name: str) -> None:
    encoder = encoder_of(made(tmp_path / "model", name))
    sample = sample_of(tmp_path, ((20, 30), ImageOptions(max_pixels=500)))
    for work in (lambda: encoder.measure(sample, ((20, 30),)), lambda: encoder.encode(sample, pixels=True)):
        with pytest.raises(DataError, match=r"an image has min_pixels, .* remove them, and resize the image itself"):
            work()
