"""GLM-4.5V: experts in the second of two language layers, and one that all tokens share."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.tiny_models import TEXT
from tests.tiny_models.glm4v import ROPE, VISION, marks, save_glm


def make(folder: Path) -> None:
    save_glm(folder, _config)


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    experts = {
        "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5, "head_dim": 8,
    }  # fmt: skip
    return {
        "model_type": "glm4v_moe",
        "vision_config": {**VISION, "attention_bias": True},
        "text_config": {**TEXT, **experts, "num_hidden_layers": 2, "vocab_size": len(ids), "rope_parameters": ROPE},
        **marks(ids),
    }
