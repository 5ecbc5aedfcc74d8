"""Mistral 3: images of several shapes whose rows end with a token of their own, and features of the last layer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PixtralImageProcessorPil

from tests.tiny_models import CHATML, TEXT, save

SPECIAL = {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8,
    "patch_size": 6, "image_size": 84,
}  # fmt: skip


def make(folder: Path, **changes: Any) -> None:
    images = PixtralImageProcessorPil(patch_size=6, size={"longest_edge": VISION["image_size"]})
    save(
        folder,
        config=lambda ids: _config(ids) | changes,
        images=images,
        special=SPECIAL,
        chat=CHATML.replace("SHOWN", "[IMG]"),
        settings={"patch_size": 6, "spatial_merge_size": 2},
    )


def _config(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "model_type": "mistral3",
        "vision_config": {"model_type": "pixtral", **VISION},
        "text_config": {"model_type": "mistral", "head_dim": 16, **TEXT, "vocab_size": len(ids)},
        "image_token_index": ids["[IMG]"],
        "spatial_merge_size": 2,
        "tie_word_embeddings": False,
    }
