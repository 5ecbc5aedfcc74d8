"""LLaVA with a SigLIP tower, of which the states behind three layers are taken, in an order of their own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import SiglipImageProcessorPil

from tests.tiny_models import TEXT, save
from tests.tiny_models.tiles.llava import CHAT, SIGLIP, SPECIAL


def make(folder: Path) -> None:
    images = SiglipImageProcessorPil(size={"height": 30, "width": 30})
    settings = {"patch_size": 7, "vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
    save(folder, config=_config, images=images, special=SPECIAL, chat=CHAT, settings=settings)


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "model_type": "llava",
        "vision_config": {**SIGLIP, "num_hidden_layers": 6},
        "text_config": {**TEXT, "model_type": "qwen2", "vocab_size": len(ids), "tie_word_embeddings": True},
        "image_token_index": ids["<image>"],
        "vision_feature_layer": [-3, 1, 3],
        "vision_feature_select_strategy": "full",
    }
