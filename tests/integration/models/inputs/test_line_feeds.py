"""Line feeds behind images: those of LLaVA's records, and those that a chat template writes by itself."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.contracts.test_families import TINY
from trials import plugins
from trials.data.records.sample import Sample, Turn
from trials.model.family import load_family
from trials.model.inputs.chat_template import once_ended
from trials.model.inputs.processor import load_processor
from trials.model.plain.plain_inputs import PlainInputs
from trials.model.skeleton import load_config

SHOWN = {"type": "image"}
AMONG_TEXT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|image_pad|>\n{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes a line feed behind each image where it stands, as InternVL's does."""


def text_of(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("name", "question", "content"),
    [
        ("llava", "<image>\nWhat?", [SHOWN, text_of("What?")]),
        ("llava", "<image>What?", [SHOWN, text_of("What?")]),
        ("llava", "<image>\n\nWhat?", [SHOWN, text_of("\nWhat?")]),
        ("llava", "What?\n<image>\nAnd?", [text_of("What?\n"), SHOWN, text_of("\nAnd?")]),
        ("llava-onevision", "<image>\n<image>\nWhat?", [SHOWN, SHOWN, text_of("What?")]),
        ("qwen2-5-vl", "<image>\nWhat?", [SHOWN, text_of("\nWhat?")]),
    ],
    ids=["one", "none", "two", "inside", "several images", "a template without"],
)
def test_a_question_has_the_line_feeds_of_its_record_and_of_the_template_once(
    tmp_path: Path, name: str, question: str, content: list[dict[str, Any]]
) -> None:
    plugins.load(TINY, name).make(tmp_path)
    check(tmp_path, question, content)


def test_line_feeds_among_the_text_are_those_of_the_template_too(tmp_path: Path) -> None:
    plugins.load(TINY, "qwen2-5-vl").make(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(AMONG_TEXT)
    shown = [text_of("Image-1: "), SHOWN, text_of("Image-2: "), SHOWN, text_of("What?")]
    check(tmp_path, "Image-1: <image>\nImage-2: <image>\nWhat?", shown)


def check(tmp_path: Path, question: str, content: list[dict[str, Any]]) -> None:
    """Check that a question is encoded as transformers' processor does with this content."""
    config = load_config(str(tmp_path))
    processor = load_processor(str(tmp_path), config, trust_remote_code=False)
    path = tmp_path / "picture.png"
    Image.new("RGB", (56, 56)).save(path)
    pictures = content.count(SHOWN)
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": [text_of("A box.")]}]
    text = processor.apply_chat_template(messages, tokenize=False)
    (expected,) = processor(images=[[Image.open(path)] * pictures], text=[text])["input_ids"]
    sample = Sample(
        turns=(Turn(role="user", text=question), Turn(role="assistant", text="A box.")),
        images=(path,) * pictures,
        image_sizes=(None,) * pictures,
    )
    encoded = load_family(config).encoder(str(tmp_path)).encode(sample, pixels=False)
    assert encoded.input_ids.tolist() == list(expected)
    plain = PlainInputs(str(tmp_path), config, trust_remote_code=False)
    assert np.array_equal(plain.token_ids(sample), encoded.input_ids)


def test_only_line_feeds_that_the_template_writes_are_left_out() -> None:
    first = {"<image>": False, "<video>": False}
    assert once_ended("<image>\n<video>\n\nSo?", first) == "<image><video>\nSo?"
    assert once_ended("<image>\nSo?", {"<video>": False}) == "<image>\nSo?"
    assert once_ended("So <image>\nwhat?", first) == "So <image>\nwhat?"
    assert once_ended("So <image>\nwhat?", {"<image>": True}) == "So <image>what?"
    assert once_ended("<image>\n\nWhat?", {"<image>": True}) == "<image>\nWhat?"
    assert once_ended("<image>\n", first) == "<image>"
    assert once_ended("<image>\n", {}) == "<image>\n"
