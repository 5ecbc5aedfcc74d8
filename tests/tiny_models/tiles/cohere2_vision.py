"""Cohere2 Vision: a SigLIP tower with Cohere 2, images in up to four tiles, and squares of four patches merged."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.tiny_models import CHATML, TEXT, save
from tests.tiny_models.tiles.llava import SIGLIP
from trials.model.inputs.cohere_tiles import Cohere2VisionImageProcessorPil

_IMAGES: dict[str, Any] = {"size": {"height": 28, "width": 28}, "max_patches": 4, "patch_size": 2}


def make(folder: Path) -> None:
    save(
        folder,
        config=_config,
        images=Cohere2VisionImageProcessorPil(**_IMAGES),
        special={
            "image_token": "<|IMG_PATCH|>",
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
        chat=CHATML.replace("SHOWN", "<|IMG_PATCH|>"),
    )


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    text = {"model_type": "cohere2", "sliding_window": 4, "logit_scale": 0.25}
    return {
        "model_type": "cohere2_vision",
        "vision_config": {**SIGLIP, "image_size": 28, "num_hidden_layers": 3},
        "text_config": {**TEXT, **text, "vocab_size": len(ids)},
        "image_token_id": ids["<|IMG_PATCH|>"],
        "alignment_intermediate_size": 24,
    }
