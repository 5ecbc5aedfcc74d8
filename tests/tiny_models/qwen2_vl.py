"""Qwen2-VL: a tied embedding, and a sliding window in the last two language layers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.tiny_models import TEXT
from tests.tiny_models.qwen2_5_vl import patch_tokens, save_patched


def make(folder: Path) -> None:
    save_patched(folder, _config)


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    vision = {
        "depth": 4, "embed_dim": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 7,
        "hidden_size": TEXT["hidden_size"],
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    return {
        "model_type": "qwen2_vl",
        "vision_config": vision,
        "text_config": {**TEXT, **windows, "vocab_size": len(ids), "rope_parameters": rope},
        "tie_word_embeddings": True,
        **patch_tokens(ids),
    }
