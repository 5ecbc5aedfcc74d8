"""Idefics3: up to 3 x 3 tiles, and the whole image."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Idefics3ImageProcessorPil

from tests.tiny_models import CHATML, TEXT, save

TILE = 18
"""Four patches of 4 pixels and a rest."""
LONGEST = 50
"""Below 3 tiles, so that sides are rounded twice."""
_MARKS = {"fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>"}
SPECIAL = {"image_token": "<image>", **_MARKS, "end_of_utterance_token": "<end_of_utterance>"}
PLACES = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 3)]
"""The third column's are missing: those are text."""


def make(folder: Path) -> None:
    images = Idefics3ImageProcessorPil(size={"longest_edge": LONGEST}, max_image_size={"longest_edge": TILE})
    write(folder, images, "idefics3")


def write(folder: Path, images: Any, model_type: str, **changes: Any) -> None:
    """Write a model of one of the types that this family takes; `changes` are those of its configuration."""
    save(
        folder,
        config=lambda ids: _config(ids) | {"model_type": model_type} | changes,
        images=images,
        special=SPECIAL,
        chat=CHATML.replace("SHOWN", "<image>"),
        tokens=PLACES,
        settings={"image_seq_len": 4},
    )


def _config(ids: Mapping[str, int]) -> dict[str, Any]:
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
        "image_size": TILE, "patch_size": 4,
    }  # fmt: skip
    return {
        "vision_config": vision,
        "text_config": {**TEXT, "model_type": "llama", "vocab_size": len(ids)},
        "scale_factor": 2,
        "image_token_id": ids["<image>"],
    }
