"""LLaVA-OneVision: a SigLIP tower without a head, images in up to six crops, of which three are kept in full."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import LlavaOnevisionImageProcessorPil

from tests.tiny_models import CHATML, TEXT, save
from tests.tiny_models.tiles.llava import SIGLIP

PINPOINTS = [[30 * rows, 30 * columns] for rows, columns in ((1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (3, 2))]
ASPECT = "anyres_max_3"


def make(folder: Path) -> None:
    images = LlavaOnevisionImageProcessorPil(size={"height": 30, "width": 30}, image_grid_pinpoints=PINPOINTS)
    settings = {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": ASPECT}
    special = {"image_token": "<image>", "video_token": "<video>"}
    chat = CHATML.replace("SHOWN", "<image>\n").replace("FILMED", "<video>\n")
    videos = {"size": {"height": 30, "width": 30}}
    save(folder, config=_config, images=images, special=special, chat=chat, settings=settings, videos=videos)


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "model_type": "llava_onevision",
        "vision_config": {**SIGLIP, "vision_use_head": False},
        "text_config": {**TEXT, "model_type": "qwen2", "vocab_size": len(ids), "tie_word_embeddings": True},
        "image_token_index": ids["<image>"],
        "video_token_index": ids["<video>"],
        "image_grid_pinpoints": PINPOINTS,
        "vision_aspect_ratio": ASPECT,
    }
