"""Tiles of Cohere2 Vision are those of transformers' own image processor, which needs torchvision."""

import ast
import importlib.util
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer
from transformers.image_utils import SizeDict
from transformers.models.cohere2_vision.processing_cohere2_vision import Cohere2VisionProcessor

from tests.tiny_models.tiles import cohere2_vision
from tests.values.parameters import parameters
from trials.data.records.sample import IMAGE, Encoder, Sample, Turn
from trials.model.family import load_family
from trials.model.inputs.chat_encoder import ChatEncoder
from trials.model.inputs.cohere_tiles import Cohere2VisionImageProcessorPil
from trials.model.shrunk import VOCABULARY, shrunk
from trials.model.skeleton import load_config

KNOWN = Path(__file__).parents[3] / "assets" / "cohere_tiles.json"
"""What `own` returned with torchvision 0.28 and transformers 5.24, by case."""
CASES = {
    "one tile": ((28, 28), (5, 9)),
    "wide and tall": ((30, 110), (300, 11)),
    "scaled up and down": ((33, 47), (480, 640)),
    "larger than all tiles": ((130, 131),),
}
"""(height, width) of images."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("cohere2-vision")
    cohere2_vision.make(made)
    return made


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return load_family(load_config(str(folder))).encoder(str(folder))


def sample_of(folder: Path, case: str) -> Sample:
    noise, images = np.random.default_rng(len(case)), tuple(folder / f"{height}.png" for height, _ in CASES[case])
    for path, size in zip(images, CASES[case], strict=True):
        Image.fromarray(noise.integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
    turns = (
        Turn(role="user", text="Compare " + " with ".join(IMAGE for _ in images)),
        Turn(role="assistant", text="A red circle."),
    )
    return Sample(turns=turns, images=images, image_sizes=(None,) * len(images))


def described(tokenizer: Any, ids: Any, pixels: Any) -> dict[str, Any]:
    """Text with runs of a token counted, and the shape, 60 values and the mean of the tiles."""
    text = re.sub(r"(<[^<>]*>)\1+", lambda run: f"{run[1]} x {len(run[0]) // len(run[1])}", tokenizer.decode(ids))
    flat = np.asarray(pixels, dtype=np.float64).ravel()
    values = [*flat[:: len(flat) // 60][:60].round(4).tolist(), round(float(flat.mean()), 5)]
    return {"text": text, "shape": list(pixels.shape), "pixels": values}


def own(encoder: Encoder, folder: Path, case: str) -> dict[str, Any]:
    """What transformers' own processor makes of a sample. Needs torchvision."""
    assert isinstance(encoder, ChatEncoder)
    sample, tokenizer = sample_of(folder, case), AutoTokenizer.from_pretrained(folder)
    images = AutoImageProcessor.from_pretrained(folder, backend="torchvision")
    processor = Cohere2VisionProcessor(image_processor=images, tokenizer=tokenizer)
    text = encoder.measurer.template.rendered(sample.turns)
    made = processor(images=[Image.open(str(path)) for path in sample.images], text=[text], return_tensors="pt")
    return described(tokenizer, made["input_ids"][0], made["pixel_values"])


@pytest.mark.parametrize("case", CASES)
def test_tokens_pixels_and_lengths_are_those_of_the_real_processor(folder: Path, encoder: Encoder, case: str) -> None:
    expected = json.loads(KNOWN.read_text())[case]
    if importlib.util.find_spec("torchvision"):
        assert own(encoder, folder, case) == expected
    assert isinstance(encoder, ChatEncoder)
    encoded = encoder.encode(sample_of(folder, case), pixels=True)
    assert encoded.pixel_values is not None
    made = described(encoder.measurer.processor.tokenizer, encoded.input_ids, encoded.pixel_values)
    # Another processor may round a pixel to the next of its 256 values.
    np.testing.assert_allclose(made.pop("pixels"), expected.pop("pixels"), atol=0.02)
    assert made == expected
    lengths = encoder.measure(sample_of(folder, case), CASES[case]).lengths
    assert (lengths.vision_units, lengths.text_tokens) == (len(encoded.pixel_values), len(encoded.input_ids))


@lru_cache
def own_functions() -> dict[str, Any]:
    """The functions of transformers' module that choose a grid of tiles, without its imports of torchvision."""
    spec = importlib.util.find_spec("transformers.models.cohere2_vision")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).with_name("image_processing_cohere2_vision.py").read_text()
    functions: list[ast.stmt] = [each for each in ast.parse(source).body if isinstance(each, ast.FunctionDef)]
    found: dict[str, Any] = {"np": np, "lru_cache": lru_cache}
    exec(compile(ast.Module(functions, []), "functions", "exec"), found)
    return found


@pytest.mark.parametrize("most", parameters({str(most): most for most in (1, 2, 4, 7, 12)}, short=("7",)))
def test_an_image_has_the_grid_of_tiles_that_transformers_chooses(most: int) -> None:
    images, seen = Cohere2VisionImageProcessorPil(size={"height": 28, "width": 28}, max_patches=most), set()
    chosen = own_functions()["get_optimal_tiled_canvas"]
    sizes = np.exp(np.random.default_rng(most).uniform(0, np.log(400), size=(300, 2))).astype(int).tolist()
    for height, width in [*sizes, (28, 28), (56, 28), (27, 29), (1, 1), (1, 400), (400, 1)]:
        columns, rows = chosen((height, width), (28, 28), 1, most)
        assert images.grid(height, width) == (rows, columns), (height, width)
        seen.add((rows, columns))
    assert {(1, most), (most, 1)} <= seen


def test_tiles_are_the_parts_of_the_image_row_by_row_and_the_whole_image_last() -> None:
    images = Cohere2VisionImageProcessorPil(size={"height": 4, "width": 4}, max_patches=6)
    picture = np.random.default_rng(0).integers(0, 256, (3, 8, 12), dtype=np.uint8)
    *tiles, whole = images.crop_image_to_patches(picture, 1, 6, patch_size=SizeDict(height=4, width=4), resample=3)
    assert np.array_equal(np.block([tiles[:3], tiles[3:]]), picture)
    assert whole.shape == (3, 4, 4)


def test_the_processor_is_found_by_its_former_name(tmp_path: Path) -> None:
    cohere2_vision.make(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(file.read_text().replace("Cohere2VisionImageProcessor", "Cohere2VisionImageProcessorFast"))
    load_family(load_config(str(tmp_path))).encoder(str(tmp_path))


def test_a_shrunk_copy_has_a_small_vocabulary_and_a_narrow_projector(folder: Path) -> None:
    config = load_config(str(folder))
    config.image_token_id, config.alignment_intermediate_size = 200, 4000
    small = shrunk(config)
    assert small.image_token_id < VOCABULARY
    assert small.alignment_intermediate_size < 200
