"""A family's encoder gives the tokens and pixels that the model's own processor makes of the same images."""

import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests.tiny_models import glm4v, paddleocr_vl, qwen2_5_vl
from tests.tiny_models.tiles import cohere2_vision, deepseek_vl, gemma3, got_ocr2, idefics3, ovis2, paligemma, smolvlm
from tests.values.parameters import parameters
from trials.data.records.sample import IGNORED, IMAGE, Encoder, Sample, Turn
from trials.errors import DataError
from trials.model.family import load_family
from trials.model.inputs import chat_template
from trials.model.inputs.processor import load_processor
from trials.model.inputs.split_images import SplitImages, split_images
from trials.model.skeleton import load_config

MODELS = {
    "gemma3": gemma3, "idefics3": idefics3, "smolvlm": smolvlm, "qwen2_5_vl": qwen2_5_vl, "glm4v": glm4v,
    "paddleocr_vl": paddleocr_vl, "deepseek_vl": deepseek_vl, "got_ocr2": got_ocr2, "cohere2_vision": cohere2_vision,
    "ovis2": ovis2, "paligemma": paligemma,
}  # fmt: skip
SHORT = ("gemma3", "smolvlm", "qwen2_5_vl", "deepseek_vl", "ovis2")
SHAPES = [(40, 90), (54, 54), (18, 18), (10, 300), (300, 11), (1, 1), (37, 35), (54, 19), (640, 480)]
"""(height, width)"""
SAMPLES = [*([shape] for shape in SHAPES[:5]), [], SHAPES[:2], SHAPES[5:9], SHAPES[3:6]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        MODELS[name].make(path)
        return path

    return made


def encoder_of(folder: Path, max_tokens: int | None = None) -> Encoder:
    return load_family(load_config(str(folder))).encoder(str(folder), max_tokens=max_tokens)


def conversation(folder: Path, shapes: list[tuple[int, int]], text: str = "{} What is {}?\n\n{}{}") -> Sample:
    random = np.random.default_rng(0)
    shown = [IMAGE] * len(shapes) + [""] * (text.count("{}") - len(shapes))
    folder.mkdir(exist_ok=True)
    images = tuple(folder / f"{number}.png" for number in range(len(shapes)))
    for path, shape in zip(images, shapes, strict=True):
        Image.fromarray(random.integers(0, 256, (*shape, 3), dtype=np.uint8)).save(path)
    turns = (
        Turn(role="user", text=text.format(*shown)),
        Turn(role="assistant", text="\n A red circle.\n\n\n"),
    )
    return Sample(turns=turns, images=images, image_sizes=(None,) * len(images))


def processor_of(folder: Path) -> Any:
    return load_processor(str(folder), load_config(str(folder)), trust_remote_code=False)


def processed(processor: Any, sample: Sample) -> Any:
    """What the real processor makes of the sample."""
    messages = [{"role": turn.role, "content": list(chat_template.parts(turn))} for turn in sample.turns]
    text = processor.tokenizer.apply_chat_template(messages, chat_template=processor.chat_template, tokenize=False)
    pictures = [[Image.open(str(path)) for path in sample.images]] if sample.images else None
    return processor(images=pictures, text=[text], return_tensors="np")


@pytest.mark.parametrize("name", parameters({name: name for name in MODELS}, short=SHORT))
def test_tokens_pixels_and_grids_are_those_of_the_real_processor(
    folder: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    encoder, processor = encoder_of(folder(name)), processor_of(folder(name))
    longest = 100 if name in ("qwen2_5_vl", "glm4v", "paddleocr_vl") else 1000
    for number, wanted in enumerate(SAMPLES):
        shapes = [shape for shape in wanted if max(shape) < longest * min(shape)]
        sample = conversation(tmp_path / str(number), shapes)
        expected, encoded = processed(processor, sample), encoder.encode(sample, pixels=True)
        assert encoded.input_ids.tolist() == expected["input_ids"][0].tolist(), shapes
        if shapes:
            assert encoded.pixel_values is not None
            assert np.array_equal(encoded.pixel_values.ravel(), np.asarray(expected["pixel_values"]).ravel()), shapes
        if "image_grid_thw" in expected:
            assert np.array_equal(encoded.grids, expected["image_grid_thw"]), shapes
        lengths = encoder.measure(sample, tuple(shapes)).lengths
        units = len(encoded.pixel_values) if encoded.pixel_values is not None else 0
        assert (lengths.vision_units, lengths.text_tokens) == (units, len(encoded.input_ids)), shapes


@pytest.mark.parametrize(
    "name", parameters({name: name for name in ("idefics3", "smolvlm", "qwen2_5_vl")}, short=("smolvlm",))
)
def test_transparent_images_are_those_of_the_real_processor(
    folder: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    sample = conversation(tmp_path, SHAPES[:2])
    random = np.random.default_rng(2)
    for path, shape in zip(sample.images, SHAPES, strict=False):
        Image.fromarray(random.integers(0, 256, (*shape, 4), dtype=np.uint8)).save(str(path))
    expected = np.asarray(processed(processor_of(folder(name)), sample)["pixel_values"])
    encoded = encoder_of(folder(name)).encode(sample, pixels=True)
    assert encoded.pixel_values is not None
    assert np.array_equal(encoded.pixel_values.ravel(), expected.ravel())


def test_a_folder_without_a_template_gets_the_prompt_of_the_processor_of_got(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    model = shutil.copytree(folder("got_ocr2"), tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    turns = (Turn(role="user", text=f"{IMAGE}\n OCR: "), Turn(role="assistant", text="A red circle."))
    sample = replace(conversation(tmp_path, [(40, 90)]), turns=turns)
    encoded = encoder_of(model).encode(sample, pixels=False)
    processor = processor_of(model)
    (prompt,) = processor(images=[[Image.open(str(path)) for path in sample.images]])["input_ids"]
    assert encoded.input_ids[: len(prompt)].tolist() == prompt
    answer = processor.tokenizer.decode(encoded.labels[encoded.labels != IGNORED])
    assert answer == "A red circle.<|im_end|>"


def test_counts_are_those_of_really_split_images(folder: Callable[[str], Path]) -> None:
    processor = processor_of(folder("idefics3"))
    split, random, seen = split_images(processor), np.random.default_rng(1), set()
    for size in np.exp(random.uniform(0, np.log(300), size=(150, 2))).astype(int).tolist():
        image = np.zeros((*size, 3), dtype=np.uint8)
        found = processor.image_processor([image], return_row_col_info=True, input_data_format="channels_last")
        assert split.layout(tuple(size)) == (found["rows"][0][0], found["cols"][0][0]), size
        seen.add(split.layout(tuple(size)))
    assert len(seen) > 4


def test_no_mask_of_pixels_is_needed(folder: Callable[[str], Path]) -> None:
    for name in ("idefics3", "smolvlm"):
        processor = processor_of(folder(name))
        for size in SHAPES:
            image = np.zeros((*size, 3), dtype=np.uint8)
            made = processor.image_processor([image], input_data_format="channels_last", return_tensors="np")
            assert made["pixel_attention_mask"].all()


def test_the_text_between_tiles_is_that_of_smolvlm(folder: Callable[[str], Path]) -> None:
    processor = processor_of(folder("idefics3"))
    split: SplitImages = split_images(processor)
    around, whole, image = split.marks
    for size in SHAPES:
        text = get_image_prompt_string(*split.layout(size), 4, around, image, whole)
        assert split.tokens(size, 4) == processor.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_text_that_spells_a_feature_of_gemma_is_an_error_of_the_data(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    sample = conversation(tmp_path, [(40, 90)], "{} <image_soft_token>")
    with pytest.raises(DataError, match="spells <image_soft_token> 1 times for 0 images; take it out"):
        encoder_of(folder("gemma3")).encode(sample, pixels=False)


@pytest.mark.parametrize("name", ["gemma3", "idefics3"])
def test_an_image_is_never_cut(folder: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    sample = conversation(tmp_path, [(54, 54)], "{}")
    whole = encoder_of(folder(name)).encode(sample, pixels=False).input_ids
    last = int(np.flatnonzero(whole == load_config(str(folder(name))).image_token_id)[-1])
    cut = encoder_of(folder(name), last + 2).encode(sample, pixels=False).input_ids
    assert cut.tolist() == whole[: last + 2].tolist()
    with pytest.raises(DataError, match="its images end at token"):
        encoder_of(folder(name), last + 1).encode(sample, pixels=False)


@pytest.mark.parametrize(
    "name", parameters({name: name for name in ("gemma3", "idefics3", "smolvlm")}, short=("smolvlm",))
)
def test_another_process_gets_the_same_encoder(folder: Callable[[str], Path], tmp_path: Path, name: str) -> None:
    encoder, sample = encoder_of(folder(name)), conversation(tmp_path, SHAPES[:2])
    copy = pickle.loads(pickle.dumps(encoder))
    assert copy.digest == encoder.digest
    assert copy.measure(sample, tuple(SHAPES[:2])).lengths == encoder.measure(sample, tuple(SHAPES[:2])).lengths
