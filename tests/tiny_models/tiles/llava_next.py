"""LLaVA-NeXT: a CLIP tower, images in up to six crops."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import LlavaNextImageProcessorPil

from tests.tiny_models import TEXT, save
from tests.tiny_models.tiles.llava import CHAT, CLIP, SPECIAL

PINPOINTS = [[28 * rows, 28 * columns] for rows, columns in ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3), (3, 2))]


def make(folder: Path) -> None:
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=PINPOINTS
    )
    settings = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    save(folder, config=_config, images=images, special=SPECIAL, chat=CHAT, settings=settings)


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "model_type": "llava_next",
        "vision_config": CLIP,
        "text_config": {**TEXT, "model_type": "mistral", "vocab_size": len(ids), "sliding_window": None},
        "image_token_index": ids["<image>"],
        "image_grid_pinpoints": PINPOINTS,
    }
