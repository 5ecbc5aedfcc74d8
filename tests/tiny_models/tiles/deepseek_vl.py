"""DeepSeek-VL: a SigLIP tower whose last norm is a part of the model, and images that are padded to squares."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.models.deepseek_vl.image_processing_pil_deepseek_vl import DeepseekVLImageProcessorPil

from tests.tiny_models import CHATML, TEXT, save
from tests.tiny_models.tiles.llava import SIGLIP


def make(folder: Path) -> None:
    save(
        folder,
        config=_config,
        images=DeepseekVLImageProcessorPil(size={"height": 28, "width": 28}, min_size=7),
        special={"image_token": "<image_placeholder>"},
        chat=CHATML.replace("SHOWN", "<image_placeholder>"),
        settings={"num_image_tokens": 16},
    )


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "model_type": "deepseek_vl",
        "vision_config": {**SIGLIP, "image_size": 28, "num_hidden_layers": 3, "vision_use_head": False},
        "text_config": {**TEXT, "model_type": "llama", "vocab_size": len(ids)},
        "image_token_id": ids["<image_placeholder>"],
        "tie_word_embeddings": False,
    }
