"""Qwen3-VL with experts in all language layers but the second, and features of the last three vision layers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.tiny_models import TEXT
from tests.tiny_models.qwen2_5_vl import patch_tokens, save_patched
from tests.tiny_models.qwen3_vl import ROPE, VISION


def make(folder: Path) -> None:
    save_patched(folder, _config)


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
    return {
        "model_type": "qwen3_vl_moe",
        "vision_config": {**VISION, "deepstack_visual_indexes": [1, 2, 3]},
        "text_config": {**TEXT, **experts, "vocab_size": len(ids), "rope_parameters": ROPE},
        **patch_tokens(ids),
    }
