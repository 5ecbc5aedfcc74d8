"""LightOnOCR: a Pixtral tower with Qwen3, and nothing between the rows of an image."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PixtralImageProcessorPil

from tests.tiny_models import CHATML, TEXT, save
from tests.tiny_models.mistral3 import SPECIAL, VISION


def make(folder: Path) -> None:
    save(
        folder,
        config=_config,
        images=PixtralImageProcessorPil(patch_size=12, size={"longest_edge": VISION["image_size"]}),
        special=SPECIAL,
        chat=CHATML.replace("SHOWN", "[IMG]"),
        settings={"patch_size": 6, "spatial_merge_size": 2},
    )


def _config(ids: Mapping[str, int]) -> dict[str, Any]:
    return {
        "model_type": "lighton_ocr",
        "vision_config": {"model_type": "pixtral", **VISION},
        "text_config": {"model_type": "qwen3", "head_dim": 16, **TEXT, "vocab_size": len(ids)},
        "image_token_id": ids["[IMG]"],
    }
