"""ViP-LLaVA: the states behind two layers of a CLIP tower, the later one first, with a norm before the projector."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CLIPImageProcessorPil

from tests.tiny_models import TEXT, save
from tests.tiny_models.tiles.llava import CHAT, CLIP, SPECIAL


def make(folder: Path) -> None:
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    settings = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    save(folder, config=_config, images=images, special=SPECIAL, chat=CHAT, settings=settings)


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "model_type": "vipllava",
        "vision_config": CLIP,
        "text_config": {**TEXT, "model_type": "llama", "vocab_size": len(ids)},
        "image_token_index": ids["<image>"],
        "vision_feature_layer": [-2, 1],
    }
