"""Prompts with completions have the tokens and labels that TRL's collator makes with the model's own processor."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.values.data import write_records
from tests.values.parameters import parameters
from trials import plugins
from trials.data import formats
from trials.data.records.sample import IGNORED, Sample
from trials.job import DataSection, ModelSection, Source
from trials.model.inputs.encoders import load_encoder
from trials.model.inputs.processor import load_processor
from trials.model.skeleton import load_config

TINY: plugins.Plugins[Any] = plugins.Plugins("tests.tiny_models")
PROMPT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "A circle."},
    {"role": "user", "content": "Which colour?"},
]
COMPLETION = [{"role": "assistant", "content": "It is red."}]


def parts(messages: list[dict[str, str]], images: int = 0) -> list[dict[str, Any]]:
    """Messages as TRL's `prepare_multimodal_messages` writes them: images first in the first question."""
    found: list[dict[str, Any]] = [
        {**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages
    ]
    if images:
        question = next(message for message in found if message["role"] == "user")
        question["content"] = [{"type": "image"}] * images + question["content"]
    return found


@pytest.mark.parametrize(
    "name",
    parameters({name: name for name in ("qwen2-5-vl", "qwen3-vl", "llava-onevision", "gemma3")}, short=("qwen2-5-vl",)),
)
def test_labels_are_those_of_trl(tmp_path: Path, name: str) -> None:
    model = tmp_path / "model"
    plugins.load(TINY, name).make(model)
    images = [Image.new("RGB", size, (90, 140, 30)) for size in ((60, 70), (130, 70))]
    for number, image in enumerate(images):
        image.save(tmp_path / f"{number}.png")
    record = {"prompt": PROMPT, "completion": COMPLETION, "images": ["0.png", "1.png"]}
    source = Source(path=write_records(tmp_path / "a.jsonl", record))
    (file,) = formats.resolve(source, tmp_path)
    ((_, sample),) = (each for chunk in formats.chunks(file) for each in formats.records(file, chunk))
    assert isinstance(sample, Sample)
    encoded = load_encoder(ModelSection(path=str(model)), DataSection(sources=(source,))).encode(sample, pixels=False)

    processor = load_processor(str(model), load_config(str(model)), trust_remote_code=False)
    asked = parts(PROMPT, len(images))
    prompt = processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    whole = processor.apply_chat_template(asked + parts(COMPLETION), tokenize=False)
    assert whole.startswith(prompt)
    of_prompt = processor(images=[images], text=[prompt], add_special_tokens=False)["input_ids"][0]
    of_completion = processor(text=[whole.removeprefix(prompt)], add_special_tokens=False)["input_ids"][0]
    assert encoded.input_ids.tolist() == [*of_prompt, *of_completion]
    assert encoded.labels.tolist() == [*np.full(len(of_prompt), IGNORED).tolist(), *of_completion]
