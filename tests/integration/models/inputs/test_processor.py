"""Lengths from a model's own processor are those of images that it really processes."""

import importlib.util
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.values.parameters import examples, parameters
from trials.data.records.sample import IMAGE, Sample, Turn
from trials.errors import DataError, ModelError
from trials.job import DataSection, ModelSection
from trials.model.inputs import chat, chat_template
from trials.model.inputs.encoders import load_encoder, load_measurer, token_limit
from trials.model.inputs.processor import load_processor
from trials.model.skeleton import load_config

# As the models' own templates write it, in short.
LLAVA_CHAT = (
    "{% for message in messages %}{{ message['role'].upper() }}: "
    "{% for part in message['content'] if part['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
IN_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}SHOWN{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_CHAT = IN_PARTS.replace("SHOWN", "<|vision_start|><|image_pad|><|vision_end|>")
GRID = [[28 * rows, 28 * columns] for rows in range(1, 4) for columns in range(1, 4)]
SIDE = {"height": 28, "width": 28}

MODELS: dict[str, dict[str, Any]] = {
    "llava": {
        "images": ("CLIPImageProcessorPil", {"size": {"shortest_edge": 28}, "crop_size": SIDE}),
        "settings": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "chat": LLAVA_CHAT,
        "image": "<image>",
    },
    "llava_next": {
        "images": (
            "LlavaNextImageProcessorPil",
            {"size": {"shortest_edge": 28}, "crop_size": SIDE, "image_grid_pinpoints": GRID},
        ),
        "settings": {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        "chat": LLAVA_CHAT,
        "image": "<image>",
    },
    "llava_onevision": {
        "images": ("LlavaOnevisionImageProcessorPil", {"size": SIDE, "image_grid_pinpoints": GRID}),
        "settings": {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        "chat": IN_PARTS.replace("SHOWN", "<image>\n"),
        "image": "<image>",
    },
    "qwen2_5_vl": {
        "images": ("Qwen2VLImageProcessorPil", {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 40}}),
        "settings": {},
        "chat": QWEN_CHAT,
        "image": "<|image_pad|>",
    },
    "glm46v": {
        "images": ("Glm46VImageProcessorPil", {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 40}}),
        "settings": {},
        "chat": IN_PARTS.replace("SHOWN", "<|vision_start|><|image|><|vision_end|>"),
        "image": "<|image|>",
    },
    "internvl": {
        "images": ("GotOcr2ImageProcessorPil", {"size": SIDE, "min_patches": 1, "max_patches": 6}),
        "settings": {"image_seq_length": 4},
        "chat": IN_PARTS.replace("SHOWN", "<IMG_CONTEXT>"),
        "image": "<IMG_CONTEXT>",
    },
}
SHORT = ("llava_next", "llava_onevision", "qwen2_5_vl", "internvl")
AROUND = {"llava": 1, "llava_next": 1, "llava_onevision": 1, "qwen2_5_vl": 2, "glm46v": 2}
"""Tokens that a template writes around an image."""
SPECIAL = {
    "image_token": "<image>",
    "video_token": "<video>",
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
}


def save_model(folder: Path, model_type: str, **changes: Any) -> Path:
    """A model folder as far as lengths need one: no weights."""
    model = MODELS[model_type] | changes
    name, options = model["images"]
    special = {key: token for key, token in {**SPECIAL, "image_token": model["image"]}.items() if token}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", *special.values()]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=tokens, show_progress=False)
    tokenizer.train_from_iterator(["What is in the picture? A red circle is in the picture."], trainer)
    if bos := model.get("bos"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, extra_special_tokens=special).save_pretrained(
        folder
    )
    getattr(transformers, name)(**options).save_pretrained(folder)
    image_token = {"image_token_id": tokenizer.token_to_id(model["image"])} if model["image"] else {}
    transformers.AutoConfig.for_model(model_type, **image_token).save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(model["settings"]))
    (folder / "chat_template.jinja").write_text(model["chat"])
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(name: str) -> Path:
        return save_model(tmp_path_factory.mktemp(name), name)

    return made


def random_sizes(seed: int, count: int) -> list[tuple[int, int]]:
    """(height, width): ordinary, odd, tiny, large, and up to 1 : 100."""
    random = np.random.default_rng(seed)
    drawn = np.exp(random.uniform(np.log(2), np.log(300), size=(count, 2))).astype(int)
    return [(1, 1), (1, 100), (100, 1), (28, 28), (56, 28), (900, 640), *((int(h), int(w)) for h, w in drawn)]


def question(images: int, answer: str = "A red circle.") -> Sample:
    turns = (Turn(role="user", text=f"{IMAGE * images}What is it?"), Turn(role="assistant", text=answer))
    return Sample(turns=turns, images=(Path("a.png"),) * images, image_sizes=(None,) * images)


def processed(processor: Any, sizes: tuple[tuple[int, int], ...], **options: int) -> tuple[int, int]:
    """(image tokens, vision units) of one sample whose images are really processed."""
    pictures = [Image.new("RGB", (width, height), (90, 20, 50)) for height, width in sizes]
    text = processor.image_token * len(pictures)
    found = processor(images=[pictures], text=[text], return_tensors=None, **options)
    pixels = found["pixel_values"]
    if "image_grid_thw" in found:
        units = len(pixels) // processor.image_processor.merge_size**2
    else:  # one sample's images, padded to the most crops, or one after the other
        units = sum(len(image) if np.ndim(image) == 4 else 1 for image in pixels)
    return len(found["input_ids"][0]), units


@pytest.mark.parametrize("name", parameters({name: name for name in MODELS}, short=SHORT))
def test_tokens_and_units_are_those_of_really_processed_images(saved: Callable[[str], Path], name: str) -> None:
    folder = saved(name)
    processor = load_processor(str(folder), load_config(str(folder)), trust_remote_code=False)
    measurer = chat.measurer(str(folder))
    text = measurer.measure(question(0), ()).lengths.text_tokens
    extra = AROUND.get(name, 0)
    seen = set()
    for size in random_sizes(1, examples(45)):
        lengths = measurer.measure(question(1), (size,)).lengths
        assert (lengths.text_tokens - text - extra, lengths.vision_units) == processed(processor, (size,)), size
        seen.add(lengths.vision_units)
    assert len(seen) > 3 or name == "llava"


@pytest.mark.parametrize("name", parameters({name: name for name in MODELS}, short=SHORT))
def test_several_images_of_a_sample_are_counted_as_they_are_processed(saved: Callable[[str], Path], name: str) -> None:
    folder = saved(name)
    processor = load_processor(str(folder), load_config(str(folder)), trust_remote_code=False)
    measurer = chat.measurer(str(folder))
    sizes = ((40, 90), (200, 50), (10, 12))
    lengths, alone = measurer.measure(question(3), sizes).lengths, measurer.measure(question(0), ()).lengths
    extra = 3 * AROUND.get(name, 0)
    if name == "llava_next":  # really processed alone: in one sample they are padded to the most crops
        tokens, units = np.sum([processed(processor, (size,)) for size in sizes], axis=0)
    else:  # InternVL's training gives each of three images a third of the six tiles
        tokens, units = processed(processor, sizes, **({"max_patches": 2} if name == "internvl" else {}))
    assert (lengths.text_tokens - alone.text_tokens - extra, lengths.vision_units) == (tokens, units)


# --- conversations ---

TALK = (
    Turn(role="system", text="Be brief."),
    Turn(role="user", text=f"First {IMAGE}, then {IMAGE}\nWhat differs?"),
    Turn(role="assistant", text=" The circle. "),
    Turn(role="user", text="Sure?"),
    Turn(role="assistant", text="Yes, \U0001f600."),
)
SIZES = ((40, 90), (28, 28))
FIRST: dict[str, tuple[str | None, bool]] = {
    "no first token": (None, False),
    "by the tokenizer": ("<|endoftext|>", False),
    "by the template": ("<|endoftext|>", True),
}
"""The token that begins a text, and whether the template writes it"""


def talk(*turns: Turn) -> Sample:
    images = sum(turn.text.count(IMAGE) for turn in turns)
    return Sample(turns=turns, images=(Path("a.png"),) * images, image_sizes=(None,) * images)


@pytest.mark.parametrize(
    ("name", "bos", "is_written"),
    parameters(
        {
            f"{name}, {first}": (name, *how)
            for name in ("llava", "qwen2_5_vl", "internvl")
            for first, how in FIRST.items()
        },
        short=("llava, by the tokenizer", "qwen2_5_vl, by the template"),
    ),
)
def test_a_conversation_has_the_tokens_that_the_real_processor_makes_of_it(
    tmp_path: Path, name: str, bos: str | None, is_written: bool
) -> None:
    template = (bos or "") * is_written + MODELS[name]["chat"]
    folder = save_model(tmp_path, name, bos=bos, chat=template)
    processor = load_processor(str(folder), load_config(str(folder)), trust_remote_code=False)
    messages = [{"role": turn.role, "content": list(chat_template.parts(turn))} for turn in TALK]
    pictures = [Image.new("RGB", (width, height)) for height, width in SIZES]
    text = processor.apply_chat_template(messages, tokenize=False)
    found = processor(images=[pictures], text=[text], add_special_tokens=not is_written)
    assert chat.measurer(str(folder)).measure(talk(*TALK), SIZES).lengths.text_tokens == len(found["input_ids"][0])


def test_targets_are_what_the_assistant_adds_to_the_prompt(saved: Callable[[str], Path]) -> None:
    measurer = chat.measurer(str(saved("qwen2_5_vl")))
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved("qwen2_5_vl"))
    said = [f"{turn.text}<|im_end|>\n" for turn in TALK if turn.role == "assistant"]
    expected = sum(len(tokenizer.encode(text)) for text in said)
    assert measurer.measure(talk(*TALK), SIZES).lengths.target_tokens == expected
    assert measurer.measure(talk(TALK[1]), SIZES).lengths.target_tokens == 0


def test_an_answer_that_is_not_learnt_is_no_target(saved: Callable[[str], Path]) -> None:
    measurer = chat.measurer(str(saved("qwen2_5_vl")))
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved("qwen2_5_vl"))
    asked = [replace(turn, is_learnt=False) for turn in TALK[:-1]]
    expected = len(tokenizer.encode(f"{TALK[-1].text}<|im_end|>\n"))
    assert measurer.measure(talk(*asked, TALK[-1]), SIZES).lengths.target_tokens == expected


def test_a_system_prompt_is_a_text_for_a_template_that_joins_it_to_one(tmp_path: Path) -> None:
    joining = (
        "{% for message in messages %}{% if message['role'] == 'system' %}{{ message['content'] + '\n' }}{% else %}"
        f"{IN_PARTS.partition('%}')[2].partition('{% endfor %}{% if add')[0]}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ).replace("SHOWN", "<|vision_start|><|image_pad|><|vision_end|>")
    measurer = chat.measurer(str(save_model(tmp_path, "qwen2_5_vl", chat=joining)))
    assert measurer.template.rendered(TALK).startswith("Be brief.\n<|im_start|>user\nFirst ")
    assert measurer.measure(talk(*TALK), SIZES).lengths.target_tokens > 0


def test_a_system_prompt_that_the_template_leaves_out_is_an_error_of_the_data(tmp_path: Path) -> None:
    """Pixtral's writes it before the last turn alone, and only if that is a question."""
    last = QWEN_CHAT.replace(
        "<|im_start|>{{ message['role'] }}\n",
        "<|im_start|>{{ message['role'] }}\n{% if loop.last and messages[0]['role'] == 'system' %}"
        "{{ messages[0]['content'][0]['text'] }}{% endif %}",
    ).replace("{% for message in messages %}", "{% for message in messages if message['role'] != 'system' %}")
    last = last.replace("{% if loop.last", "{% if message['role'] == 'user' and loop.last")
    measurer = chat.measurer(str(save_model(tmp_path, "qwen2_5_vl", chat=last)))
    with pytest.raises(DataError, match="leaves out the system prompt; take that out of the record"):
        measurer.measure(talk(*TALK), SIZES)
    assert measurer.measure(talk(*TALK[1:]), SIZES).lengths.target_tokens > 0


@pytest.mark.parametrize("limit", [1000, 60, 57])
def test_a_sample_is_cut_behind_its_images(saved: Callable[[str], Path], limit: int) -> None:
    folder = str(saved("qwen2_5_vl"))
    whole = chat.measurer(folder).measure(question(1, "A red circle. " * 9), ((60, 60),)).lengths
    cut = chat.measurer(folder, False, limit).measure(question(1, "A red circle. " * 9), ((60, 60),)).lengths
    lost = max(0, whole.text_tokens - limit)
    assert (cut.vision_units, cut.text_tokens) == (whole.vision_units, whole.text_tokens - lost)
    assert cut.target_tokens == whole.target_tokens - lost


def test_an_image_is_never_cut(saved: Callable[[str], Path]) -> None:
    measurer = chat.measurer(str(saved("qwen2_5_vl")), False, 20)
    with pytest.raises(DataError, match=r"its images end at token \d+ of \d+, behind the 20 .* raise data.max_tokens"):
        measurer.measure(question(1), ((300, 300),))
    assert measurer.measure(question(0), ()).lengths.text_tokens == 20


@pytest.mark.parametrize(
    ("sample", "sizes", "message"),
    [
        (question(1), ((2, 1000),), r"refuses an image of 1000 x 2 pixels: absolute aspect ratio must be smaller"),
        (question(0, "It is <|image_pad|>."), (), r"spells <\|image_pad\|> 1 times for 0 images; take it out"),
    ],
)
def test_a_sample_that_the_processor_refuses_is_an_error_of_the_data(
    saved: Callable[[str], Path], sample: Sample, sizes: tuple[tuple[int, int], ...], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        chat.measurer(str(saved("qwen2_5_vl"))).measure(sample, sizes)


def test_a_conversation_that_the_template_refuses_is_an_error_of_the_data(tmp_path: Path) -> None:
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}" + QWEN_CHAT
    measurer = chat.measurer(str(save_model(tmp_path, "qwen2_5_vl", chat=strict)))
    with pytest.raises(DataError, match="the model's chat template refuses the conversation: begin with the user"):
        measurer.measure(talk(*TALK), SIZES)


def test_a_template_that_writes_the_date_writes_the_same_on_every_day(tmp_path: Path) -> None:
    dated = (
        "\n{% set today = strftime_now('%Y-%m-%d') %}\nToday is {{ today }}, {{ strftime_now('%-d %B') }}. " + QWEN_CHAT
    )
    measurer = chat.measurer(str(save_model(tmp_path, "qwen2_5_vl", chat=dated)))
    assert measurer.template.rendered(talk(*TALK).turns).startswith("\nToday is 2025-01-01, 1 January. ")


def test_a_conversation_that_begins_with_an_answer_is_an_error_of_the_data(tmp_path: Path) -> None:
    measurer = chat.measurer(str(save_model(tmp_path, "qwen2_5_vl", chat=QWEN_CHAT)))
    with pytest.raises(DataError, match="the conversation begins with an answer; begin it with a question"):
        measurer.measure(talk(Turn(role="assistant", text="Hello."), *TALK[1:]), SIZES)


# --- models ---


def test_another_process_gets_the_same_measurer(saved: Callable[[str], Path]) -> None:
    measurer = chat.measurer(str(saved("llava_next")), False, 110)
    copy = pickle.loads(pickle.dumps(measurer))
    assert (copy.digest, copy.max_tokens) == (measurer.digest, 110)
    assert copy.measure(question(1), ((40, 90),)).lengths == measurer.measure(question(1), ((40, 90),)).lengths


def test_the_digest_covers_what_lengths_depend_on(tmp_path: Path) -> None:
    def digest(name: str = "qwen2_5_vl", limit: int | None = None, **changes: Any) -> str:
        return chat.measurer(str(save_model(tmp_path, name, **changes)), False, limit).digest

    images = ("Qwen2VLImageProcessorPil", {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 9}})
    others = (digest(limit=90), digest(images=images), digest(chat=QWEN_CHAT + "\n"), digest(bos="<|im_end|>"))
    assert len({digest(), *others}) == 5
    assert digest() == digest()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("blip-2", {}, "'blip-2' has a Blip2Processor in transformers, which cannot tell an image's tokens from its"),
        ("qwen2", {}, "'qwen2' has no processor in transformers"),
        (
            "llava",
            {"settings": {}},
            r"processor_config.json is not there, or lacks patch_size, .*: by config.json, patch",
        ),
        ("llava", {"image": None}, "<image> is no token of its own; add it to the tokenizer"),
        ("qwen2_5_vl", {"chat": "{% for m in messages %}{{ m['role'] }}{% endfor %}"}, "does not show an image as"),
    ],
)
def test_a_model_whose_processor_gives_no_lengths_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    save_model(tmp_path, name if name in MODELS else "llava", **changes)
    transformers.AutoConfig.for_model(name).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=message):
        chat.measurer(str(tmp_path))


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed")
def test_a_processor_whose_package_is_missing_is_refused_with_the_package(tmp_path: Path) -> None:
    transformers.AutoConfig.for_model("omdet-turbo").save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match="OmDetTurboProcessor, needs the package torchvision, which is not installed; inst"
    ):
        chat.measurer(str(tmp_path))


def test_a_job_is_measured_by_the_encoder_of_the_training_where_there_is_one(
    example: Path, saved: Callable[[str], Path]
) -> None:
    data = DataSection.model_validate({"sources": [{"path": "a"}], "oversize": "truncate"})
    trained, other = (ModelSection(path=str(path)) for path in (example / "model", saved("glm46v")))
    assert load_measurer(trained, data).digest == load_encoder(trained, data).digest
    assert load_measurer(other, data).max_tokens == token_limit(data, load_config(other.path))
    with pytest.raises(ModelError, match="'glm46v' is not supported"):
        load_encoder(other, data)


def test_samples_are_cut_to_the_context_unless_the_job_says_otherwise(saved: Callable[[str], Path]) -> None:
    config = load_config(str(saved("llava")))
    for changes, limit in (
        ({}, None),
        ({"oversize": "truncate"}, config.get_text_config().max_position_embeddings),
        ({"oversize": "truncate", "max_tokens": 99}, 99),
    ):
        assert token_limit(DataSection.model_validate({"sources": [{"path": "a"}], **changes}), config) == limit
