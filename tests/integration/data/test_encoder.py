import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from autotune.data_problems import model_findings
from tests.values.data import file_of
from tests.values.parameters import examples, parameters
from trials.data import formats
from trials.data.records.images import image_pixels, image_size
from trials.data.records.sample import IGNORED, IMAGE, Encoded, Encoder, Lengths, Sample, Turn
from trials.errors import DataError, ModelError
from trials.job import ModelSection
from trials.model.families import internvl
from trials.model.inputs.processor import load_processor
from trials.model.skeleton import load_config

TOKENS_PER_TILE = 16
SPELLED = ("<|im_end|>", "<|im_start|>", "<|endoftext|>", "\n", "a circle", "ä\U0001f600")
SIZES = {(60, 60): 1, (60, 120): 3, (180, 60): 4, (120, 120): 5, (1, 1): 1, (3, 50): 5}
"""Tiles, thumbnail included, of an image of its own by its (height, width)."""

texts = st.lists(st.one_of(st.sampled_from(SPELLED), st.text(max_size=5)), max_size=5).map("".join)
texts = texts.filter(lambda text: IMAGE not in text)


@pytest.fixture(scope="module")
def encoder(example: Path) -> Encoder:
    return internvl.encoder(str(example / "model"))


@pytest.fixture(scope="module")
def tokenizer(example: Path) -> Any:
    return AutoTokenizer.from_pretrained(example / "model")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Path]:
    """An image file of each of SIZES."""
    folder = tmp_path_factory.mktemp("pictures")
    paths = {size: folder / f"{size[0]}x{size[1]}.png" for size in SIZES}
    for (height, width), path in paths.items():
        Image.new("RGB", (width, height), (height % 256, 100, 50)).save(path)
    return paths


def sample_of(*texts: str, images: tuple[Path | bytes, ...] = ()) -> Sample:
    turns = tuple(Turn(role="assistant" if number % 2 else "user", text=text) for number, text in enumerate(texts))
    return Sample(turns=turns, images=images, image_sizes=(None,) * len(images))


def lengths_of(encoded: Encoded) -> Lengths:
    return Lengths(
        vision_units=0 if encoded.pixel_values is None else len(encoded.pixel_values),
        text_tokens=len(encoded.input_ids),
        target_tokens=int(np.count_nonzero(encoded.labels != IGNORED)),
    )


def measured(encoder: Encoder, sample: Sample) -> Lengths:
    return encoder.measure(sample, tuple(image_size(path) for path in sample.images)).lengths


def example_samples(example: Path) -> list[Sample]:
    file = file_of(example / "data" / "train.jsonl")
    found = [sample for chunk in formats.chunks(file) for _, sample in formats.records(file, chunk)]
    return [sample for sample in found if isinstance(sample, Sample)]


def test_measured_lengths_are_the_encoded_ones_on_the_example(example: Path, encoder: Encoder) -> None:
    samples = example_samples(example)
    assert len(samples) == 48
    for sample in samples:
        assert measured(encoder, sample) == lengths_of(encoder.encode(sample, pixels=True))


@settings(max_examples=examples(60))
@given(conversation=st.lists(texts, min_size=1, max_size=4), sizes=st.lists(st.sampled_from(sorted(SIZES)), max_size=4))
def test_measured_lengths_are_the_encoded_ones_whatever_the_text_spells(
    encoder: Encoder, pictures: dict[tuple[int, int], Path], conversation: list[str], sizes: list[tuple[int, int]]
) -> None:
    opening = IMAGE * len(sizes) + conversation[0]
    sample = sample_of(opening, *conversation[1:], images=tuple(pictures[size] for size in sizes))
    lengths, encoded = measured(encoder, sample), encoder.encode(sample, pixels=True)
    assert lengths == lengths_of(encoded)
    assert np.array_equal(encoded.input_ids, encoder.encode(sample, pixels=False).input_ids)


def chat(tokenizer: Any, sample: Sample, tiles: list[int]) -> str:
    """Return the text of the model's own chat template for the sample, with image tokens."""
    messages = [{"role": turn.role, "content": turn.text} for turn in sample.turns]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    for count in tiles:
        text = text.replace(IMAGE, f"<img>{'<IMG_CONTEXT>' * TOKENS_PER_TILE * count}</img>", 1)
    return text


@settings(max_examples=examples(60))
@given(conversation=st.lists(texts, min_size=2, max_size=4))
def test_tokens_are_those_of_the_chat_template_whatever_the_text_spells(
    encoder: Encoder, tokenizer: Any, pictures: dict[tuple[int, int], Path], conversation: list[str]
) -> None:
    sample = sample_of(IMAGE + conversation[0], *conversation[1:], images=(pictures[60, 120],))
    input_ids = encoder.encode(sample, pixels=False).input_ids.tolist()
    assert input_ids == tokenizer(chat(tokenizer, sample, [3]))["input_ids"]


@pytest.mark.parametrize("token", ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"])
def test_a_text_that_spells_a_token_of_images_is_refused(encoder: Encoder, token: str) -> None:
    with pytest.raises(DataError, match=f"the conversation spells {token} 1 times for 0 "):
        measured(encoder, sample_of(f"What is {token}?", "b"))


def test_tokens_are_those_of_the_chat_template(example: Path, encoder: Encoder, tokenizer: Any) -> None:
    for sample in example_samples(example):
        tiles = [measured(encoder, sample_of(IMAGE, images=(path,))).vision_units for path in sample.images]
        if len(tiles) < 2:
            expected = tokenizer(chat(tokenizer, sample, tiles))["input_ids"]
            assert encoder.encode(sample, pixels=False).input_ids.tolist() == expected


IN_PARTS = (
    "{% for message in messages %}HEAD{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As the published folders have it."""
HEAD = "{{ '<|im_start|>' + message['role'] + '\n' }}"
TEMPLATES = {
    "in parts": IN_PARTS.replace("HEAD", HEAD),
    "system prompt": "<|im_start|>system\nBe kind.<|im_end|>\n" + IN_PARTS.replace("HEAD", HEAD),
    "first token": "<|endoftext|>" + IN_PARTS.replace("HEAD", HEAD),
    "names": IN_PARTS.replace("HEAD", "{{ message['role'] | capitalize + ': ' }}").replace(
        "<|im_start|>assistant\n", "Assistant: "
    ),
    "thinking": IN_PARTS.replace("HEAD", HEAD).replace("assistant\n", "assistant\n<think>\n"),
}


@pytest.mark.parametrize(
    ("name", "begins"),
    parameters(
        {f"{name}, {begins}": (name, begins) for name in TEMPLATES for begins in (False, True)},
        short=("system prompt, False", "first token, True", "names, True", "thinking, False"),
    ),
)
def test_the_folders_own_template_and_tokenizer_are_used(
    example: Path, tmp_path: Path, pictures: dict[tuple[int, int], Path], name: str, begins: bool
) -> None:
    folder = shutil.copytree(example / "model", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.bos_token, tokenizer.chat_template = "<|endoftext|>", TEMPLATES[name]
    if begins:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
        )
    tokenizer.save_pretrained(folder)
    encoder = internvl.encoder(str(folder))
    assert encoder.no_template is None
    sample = sample_of(f"{IMAGE}\nHow many?", "Two.", "Which?", "Red.", images=(pictures[60, 120],))
    content = [{"type": "image"}, {"type": "text", "text": "How many?"}]  # the templates write the line feed
    messages: Any = [{"role": "user", "content": content}] + [
        {"role": turn.role, "content": [{"type": "text", "text": turn.text}]} for turn in sample.turns[1:]
    ]
    text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    image = f"<img>{'<IMG_CONTEXT>' * TOKENS_PER_TILE * 3}</img>"
    expected = tokenizer(text.replace("<IMG_CONTEXT>", image), add_special_tokens=not text.startswith("<|endoftext|>"))
    encoded = encoder.encode(sample, pixels=True)
    assert encoded.input_ids.tolist() == expected["input_ids"]
    assert tokenizer.decode(encoded.labels[encoded.labels != IGNORED]) == "Two.<|im_end|>\nRed.<|im_end|>\n"


def test_a_folder_without_a_template_gets_chatml_and_it_is_said(
    example: Path, tmp_path: Path, encoder: Encoder, pictures: dict[tuple[int, int], Path]
) -> None:
    folder = shutil.copytree(example / "model", tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    bare = internvl.encoder(str(folder))
    assert bare.no_template == "conversations are written as ChatML"
    (finding,) = model_findings(bare, ModelSection(path=str(folder)))
    assert finding.what == f"model {folder} has no chat template: conversations are written as ChatML"
    sample = sample_of(f"{IMAGE}\nHow many?", "Two.", images=(pictures[60, 120],))
    assert (
        bare.encode(sample, pixels=False).input_ids.tolist() == encoder.encode(sample, pixels=False).input_ids.tolist()
    )


def test_targets_are_the_answers_and_the_ends_of_their_turns(encoder: Encoder, tokenizer: Any) -> None:
    conversation = ("How many?", "\nTwo circles.", "Which colour?", "Red.")
    system = Turn(role="system", text="Be brief.")
    sample = sample_of(*conversation)
    sample = Sample(turns=(system, *sample.turns), images=(), image_sizes=())
    encoded = encoder.encode(sample, pixels=True)
    is_target = encoded.labels != IGNORED
    assert np.array_equal(encoded.labels[is_target], encoded.input_ids[is_target])
    assert tokenizer.decode(encoded.labels[is_target]) == "\nTwo circles.<|im_end|>\nRed.<|im_end|>\n"
    assert tokenizer.decode(encoded.input_ids).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow"
    )


def test_an_answer_that_is_not_learnt_is_no_target(encoder: Encoder, tokenizer: Any) -> None:
    sample = sample_of("How many?", "Two circles.", "Which colour?", "Red.")
    first, answer, *others = sample.turns
    encoded = encoder.encode(replace(sample, turns=(first, replace(answer, is_learnt=False), *others)), pixels=True)
    assert np.array_equal(encoded.input_ids, encoder.encode(sample, pixels=True).input_ids)
    assert tokenizer.decode(encoded.labels[encoded.labels != IGNORED]) == "Red.<|im_end|>\n"


@pytest.mark.parametrize(("size", "tiles"), SIZES.items())
def test_an_image_of_its_own_may_take_all_tiles(
    encoder: Encoder, pictures: dict[tuple[int, int], Path], size: tuple[int, int], tiles: int
) -> None:
    encoded = encoder.encode(sample_of(IMAGE, "b", images=(pictures[size],)), pixels=True)
    assert encoded.pixel_values is not None
    assert encoded.pixel_values.shape == (tiles, *encoder.unit_shape) == (tiles, 3, 56, 56)
    assert encoded.pixel_values.dtype == np.float32


@pytest.mark.parametrize(("images", "tiles"), [(2, 6), (3, 3), (5, 5)])
def test_several_images_share_the_tiles(
    encoder: Encoder, pictures: dict[tuple[int, int], Path], images: int, tiles: int
) -> None:
    sample = sample_of(IMAGE * images, "b", images=(pictures[60, 120],) * images)
    assert measured(encoder, sample).vision_units == tiles


def test_tiles_come_in_the_order_of_the_images(encoder: Encoder, tmp_path: Path) -> None:
    colors = {"black": (0, 0, 0), "white": (255, 255, 255)}
    for name, color in colors.items():
        Image.new("RGB", (60, 60), color).save(tmp_path / f"{name}.png")
    paths = tuple(tmp_path / f"{name}.png" for name in ("white", "black", "white"))
    pixels = encoder.encode(sample_of(IMAGE * 3, "b", images=paths), pixels=True).pixel_values
    assert pixels is not None
    assert (pixels.mean(axis=(1, 2, 3)) > 0).tolist() == [True, False, True]


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGBA", "CMYK"])
def test_images_of_every_mode_of_8_bits_become_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.tiff"
    Image.new(mode, (7, 5)).save(path)
    assert image_size(path) == (5, 7)
    assert image_pixels(path).shape == (5, 7, 3)


LONG = ("How many?", "Two circles and a square. " * 5)


@pytest.mark.parametrize("lost", [0, pytest.param(1, marks=pytest.mark.long), 20])
def test_a_sample_is_cut_alike_when_it_is_measured_and_encoded(
    example: Path, encoder: Encoder, pictures: dict[tuple[int, int], Path], lost: int
) -> None:
    sample = sample_of(IMAGE + LONG[0], LONG[1], images=(pictures[60, 120],))
    whole = encoder.encode(sample, pixels=True)
    limit = len(whole.input_ids) - lost
    cutter = internvl.encoder(str(example / "model"), max_tokens=limit)
    cut = cutter.encode(sample, pixels=True)
    assert measured(cutter, sample) == lengths_of(cut)
    assert cut.input_ids.tolist() == whole.input_ids[:limit].tolist()
    assert cut.labels.tolist() == whole.labels[:limit].tolist()
    assert cut.pixel_values is not None
    assert whole.pixel_values is not None
    assert np.array_equal(cut.pixel_values, whole.pixel_values)
    assert cutter.digest != encoder.digest


@pytest.mark.parametrize("opening", [IMAGE * 2, f"{'word ' * 30}{IMAGE}"])
def test_no_image_is_cut_or_left_out(example: Path, pictures: dict[tuple[int, int], Path], opening: str) -> None:
    sample = sample_of(opening, LONG[1], images=(pictures[60, 60],) * opening.count(IMAGE))
    whole = internvl.encoder(str(example / "model")).encode(sample, pixels=False).input_ids.tolist()
    end = len(whole) - whole[::-1].index(AutoTokenizer.from_pretrained(example / "model").end_image_token_id)
    cutter = internvl.encoder(str(example / "model"), max_tokens=end - 1)
    for call in (lambda: measured(cutter, sample), lambda: cutter.encode(sample, pixels=True)):
        with pytest.raises(
            DataError, match=rf"its images end at token {end} of {len(whole)}, behind the {end - 1} that"
        ):
            call()
    assert len(internvl.encoder(str(example / "model"), max_tokens=end).encode(sample, pixels=False).input_ids) == end


@pytest.mark.parametrize("pixels", [False, True])
@pytest.mark.parametrize("images", [0, 2])
def test_a_blank_sample_has_the_lengths_and_teaches_nothing(
    example: Path, encoder: Encoder, pictures: dict[tuple[int, int], Path], images: int, pixels: bool
) -> None:
    sample = sample_of(IMAGE * images + "a", "b", images=(pictures[60, 120],) * images)
    lengths = measured(encoder, sample)
    blank = encoder.blank(lengths, pixels=pixels)
    context = AutoTokenizer.from_pretrained(example / "model").context_image_token_id
    assert len(blank.input_ids) == lengths.text_tokens
    assert np.count_nonzero(blank.input_ids == context) == TOKENS_PER_TILE * lengths.vision_units
    assert (blank.labels == IGNORED).all()
    if pixels and images:
        assert blank.pixel_values is not None
        assert blank.pixel_values.shape == (lengths.vision_units, *encoder.unit_shape)
        assert blank.pixel_values.dtype == np.float32
        assert not blank.pixel_values.any()
    else:
        assert blank.pixel_values is None


def test_an_image_that_is_damaged_behind_its_header_is_an_error_of_the_data(encoder: Encoder, tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    Image.effect_noise((100, 100), 50).save(path)
    content = path.read_bytes()
    path.write_bytes(content[:2000] + bytes(100) + content[2100:])
    sample = sample_of(IMAGE, "b", images=(path,))
    assert measured(encoder, sample).vision_units == 5
    with pytest.raises(DataError, match=r"a\.png cannot be decoded: "):
        encoder.encode(sample, pixels=True)


def test_tokens_and_tiles_are_those_of_the_real_processor(example: Path, encoder: Encoder, tokenizer: Any) -> None:
    folder = str(example / "model")
    processor = load_processor(folder, load_config(folder), trust_remote_code=False)
    processor.image_seq_length = TOKENS_PER_TILE
    for sample in example_samples(example):
        text = chat(tokenizer, sample, []).replace(IMAGE, "<IMG_CONTEXT>")
        pictures = [image_pixels(path) for path in sample.images]
        most = {"max_patches": max(1, 4 // len(pictures))} if pictures else {}
        expected = processor(images=pictures or None, text=text, return_tensors="np", **most)
        encoded = encoder.encode(sample, pixels=True)
        assert encoded.input_ids.tolist() == expected["input_ids"][0].tolist()
        if encoded.pixel_values is None:
            assert "pixel_values" not in expected
        else:
            assert np.array_equal(encoded.pixel_values, expected["pixel_values"])


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json; save the model there"):
        internvl.encoder(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"image_token_id": 1}, "the tokenizer's image token is .*, the model's is 1"),
        ("preprocessor_config.json", {"size": {"height": 28, "width": 56}}, r"tiles of \(28, 56\) .* takes \(56, 56\)"),
        ("preprocessor_config.json", {"image_processor_type": "CLIPImageProcessor"}, "does not cut images into tiles"),
        ("tokenizer_config.json", {"start_image_token": None}, "the tokenizer has no start_image_token"),
    ],
)
def test_a_model_folder_that_contradicts_itself_is_refused(
    example: Path, tmp_path: Path, file: str, changes: dict[str, Any], message: str
) -> None:
    shutil.copytree(example / "model", tmp_path / "model")
    path = tmp_path / "model" / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=message):
        internvl.encoder(str(path.parent))
