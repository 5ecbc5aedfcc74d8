"""A small Qwen2.5-VL with pages of any size and long chats: a job of another kind than the example's."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image, ImageDraw
from transformers import Qwen2VLImageProcessorPil

from benchmarks.full_training.jobs import write_job
from tests.tiny_models import TEXT, save
from tests.tiny_models.qwen2_5_vl import CHAT, SPECIAL, patch_tokens

_PATCH = 28
"""Pixels on each side of a merged patch."""
_MOST_PATCHES, _PATCHES = 80, math.exp(2.8)
"""Merged patches of an image, at most and at the median."""
_WORDS = ("total", "date", "page", "the", "of", "is", "a", "on", "line", "column", "table", "figure", "left", "above")


def make_job(folder: Path, samples: int) -> Path:
    """Write the model, the data and a job for two ranks into the folder; return the job file."""
    vision = {
        "depth": 10, "hidden_size": 128, "num_heads": 4, "intermediate_size": 384, "out_hidden_size": 192,
        "fullatt_block_indexes": [4, 9],
    }  # fmt: skip
    text = {"hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 6}
    save_model(folder / "model", vision, text, section=[8, 8, 8], most_patches=_MOST_PATCHES)
    return write_job(
        folder / "job.yaml", folder / "model", make_data(folder / "data", samples), hardware={"memory_limit": "220MiB"}
    )


def save_model(
    folder: Path, vision: Mapping[str, Any], text: Mapping[str, Any], *, section: Sequence[int], most_patches: int
) -> None:
    """Write the configuration of a Qwen2.5-VL of these sizes, whose images have at most `most_patches` merged patches.

    `section` divides half of the width of a head between positions in time, height and width.
    """
    images = Qwen2VLImageProcessorPil(
        patch_size=_PATCH // 2,
        merge_size=2,
        size={"shortest_edge": 4 * _PATCH**2, "longest_edge": most_patches * _PATCH**2},
    )
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [*section]}

    def config(ids: Mapping[str, int]) -> Mapping[str, Any]:
        return {
            "model_type": "qwen2_5_vl",
            "vision_config": {"patch_size": _PATCH // 2, "window_size": 4 * _PATCH, **vision},
            "text_config": {**TEXT, "vocab_size": len(ids), "rope_parameters": rope, **text},
            "tie_word_embeddings": text.get("tie_word_embeddings", False),
            **patch_tokens(ids),
        }

    save(folder, config=config, images=images, special=SPECIAL, chat=CHAT)


def make_data(folder: Path, samples: int, patches: float = _PATCHES) -> Path:
    """Write images and an annotation file in LLaVA's format; return the file. Half of the images have `patches`."""
    (folder / "images").mkdir(parents=True)
    random = Random(7)
    records = [_record(folder, number, random, patches) for number in range(samples)]
    file = folder / "train.jsonl"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return file


def _record(folder: Path, number: int, random: Random, patches: float) -> Mapping[str, Any]:
    """Return a sample; a fifth of them are chats without an image, with four times as many words."""
    shown = random.random() < 0.8
    words = round(random.lognormvariate(2.5 if shown else 3.9, 0.8)) + 1
    question = "What is written on the page?" if shown else "Continue."
    turns = [
        {"from": "human", "value": "<image>\n" * shown + question},
        {"from": "gpt", "value": " ".join(random.choices(_WORDS, k=min(words, 250)))},
    ]
    image = {"image": _draw_page(folder / "images", number, random, patches)} if shown else {}
    return {"id": number, **image, "conversations": turns}


def _draw_page(folder: Path, number: int, random: Random, patches: float) -> str:
    """Draw lines on white paper: receipts, pages and cut-outs; return the name."""
    patches = patches * random.lognormvariate(0.0, 0.7)
    aspect = random.choice((0.3, 0.7, 1.4, 3.0)) * random.uniform(0.9, 1.1)
    width, height = (max(round(_PATCH * (patches * each) ** 0.5), _PATCH) for each in (aspect, 1 / aspect))
    page = Image.new("RGB", (width, height), "white")
    canvas = ImageDraw.Draw(page)
    for top in range(8, height, 12):
        canvas.line((4, top, random.randint(4, width), top), fill="black", width=3)
    name = f"{number:05}.png"
    page.save(folder / name)
    return f"images/{name}"
