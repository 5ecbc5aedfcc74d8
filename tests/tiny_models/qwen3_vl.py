"""Qwen3-VL: features of the first and the third of four vision layers, and a square of 4 x 4 learned positions."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.tiny_models import TEXT
from tests.tiny_models.qwen2_5_vl import patch_tokens, save_patched

VISION = {
    "depth": 4, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "patch_size": 7,
    "out_hidden_size": TEXT["hidden_size"], "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2],
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}


def make(folder: Path) -> None:
    save_patched(folder, _config)


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "model_type": "qwen3_vl",
        "vision_config": VISION,
        "text_config": {**TEXT, "head_dim": 8, "vocab_size": len(ids), "rope_parameters": ROPE},
        **patch_tokens(ids),
    }
