"""Aya Vision: a SigLIP tower with Cohere 2, images in up to four tiles, and squares of four patches that are merged."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GotOcr2ImageProcessorPil

from tests.tiny_models import CHATML, TEXT, save
from tests.tiny_models.tiles.llava import SIGLIP

_TOKENS = (
    "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 5)),
)  # fmt: skip


def make(folder: Path) -> None:
    save(
        folder,
        config=_config,
        images=GotOcr2ImageProcessorPil(size={"height": 28, "width": 28}, max_patches=4),
        special={},
        tokens=("<|IMG_PATCH|>", *_TOKENS),
        chat=CHATML.replace("SHOWN", "<image>"),
        settings={"patch_size": 7, "img_size": 28, "downsample_factor": 2},
    )


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    text = {"model_type": "cohere2", "sliding_window": 4, "logit_scale": 0.25}
    return {
        "model_type": "aya_vision",
        "vision_config": {**SIGLIP, "image_size": 28, "num_hidden_layers": 3},
        "text_config": {**TEXT, **text, "vocab_size": len(ids)},
        "image_token_index": ids["<|IMG_PATCH|>"],
    }
