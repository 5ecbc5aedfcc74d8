"""LLaVA-NeXT-Video: the tower and crops of LLaVA-NeXT, and frames pooled by the largest of each square of four."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import LlavaNextImageProcessorPil

from tests.tiny_models import CHATML, TEXT, save
from tests.tiny_models.tiles.llava import CLIP
from tests.tiny_models.tiles.llava_next import PINPOINTS


def make(folder: Path) -> None:
    tile = {"height": 28, "width": 28}
    save(
        folder,
        config=_config,
        images=LlavaNextImageProcessorPil(size={"shortest_edge": 28}, crop_size=tile, image_grid_pinpoints=PINPOINTS),
        special={"image_token": "<image>", "video_token": "<video>"},
        chat=CHATML.replace("SHOWN", "<image>\n").replace("FILMED", "<video>\n"),
        settings={"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        videos={"size": {"shortest_edge": 32}, "crop_size": tile},
    )


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "model_type": "llava_next_video",
        "vision_config": CLIP,
        "text_config": {**TEXT, "model_type": "llama", "vocab_size": len(ids)},
        "image_token_index": ids["<image>"],
        "video_token_index": ids["<video>"],
        "image_grid_pinpoints": PINPOINTS,
        "spatial_pool_mode": "max",
    }
