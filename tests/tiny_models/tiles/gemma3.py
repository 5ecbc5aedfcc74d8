"""Gemma 3: images of four tokens, windows of three, and a tower with a pooling head that is not used."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import Gemma3ImageProcessorPil

from tests.tiny_models import CHATML, TEXT, save

SPECIAL = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
SIDE = 18
"""Four patches of 4 pixels and a rest."""


def make(folder: Path) -> None:
    images = Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE})
    chat = CHATML.replace("SHOWN", "<start_of_image>")
    save(folder, config=_config, images=images, special=SPECIAL, chat=chat, settings={"image_seq_length": 4})


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "image_size": SIDE, "patch_size": 4,
    }  # fmt: skip
    layers = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    rope = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0}}
    text = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 3, "layer_types": layers}
    return {
        "model_type": "gemma3",
        "vision_config": vision,
        "text_config": {**TEXT, **text, "rope_parameters": rope, "vocab_size": len(ids)},
        "mm_tokens_per_image": 4,
        "image_token_index": ids["<image_soft_token>"],
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
    }
