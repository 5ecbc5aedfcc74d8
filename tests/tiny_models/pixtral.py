"""Pixtral-12B: LLaVA with a Pixtral tower, one token for each patch."""

from pathlib import Path
from typing import Any

from transformers import PixtralImageProcessorPil

from tests.tiny_models import CHATML, TEXT, save
from tests.tiny_models.mistral3 import SPECIAL, VISION


def make(folder: Path, **changes: Any) -> None:
    save(
        folder,
        config=lambda ids: {
            "model_type": "llava",
            "vision_config": {"model_type": "pixtral", **VISION},
            "text_config": {"model_type": "mistral", "head_dim": 16, **TEXT, "vocab_size": len(ids)},
            "image_token_index": ids["[IMG]"],
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            **changes,
        },
        images=PixtralImageProcessorPil(patch_size=VISION["patch_size"], size={"longest_edge": VISION["image_size"]}),
        special=SPECIAL,
        chat=CHATML.replace("SHOWN", "[IMG]"),
        settings={"patch_size": VISION["patch_size"]},
    )
