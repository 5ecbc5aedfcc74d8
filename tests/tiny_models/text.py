"""Language models without images, of each kind of attention, scales and experts: `make` is Qwen3."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.tiny_models import CHATML, TEXT, save

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
KINDS: dict[str, Mapping[str, Any]] = {
    "llama": {},
    "llama scaled": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 512,
        },
    },
    "qwen2": {"tie_word_embeddings": True},
    "qwen2 window": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    "qwen2 dynamic": {
        "max_position_embeddings": 40,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    },
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 4},
    "gemma3_text": {
        "head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma2": {
        "head_dim": 16, "sliding_window": 4, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 1.5,
    },
    "granite": {
        "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0, "attention_multiplier": 0.125,
    },
    "cohere": {"logit_scale": 0.0625, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 4},
    "gpt_oss": {**EXPERTS, "head_dim": 16, "sliding_window": 4},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "mixtral": EXPERTS,
}  # fmt: skip
"""Settings of each kind beyond TEXT, by its model type and what is special."""


def make(folder: Path) -> None:
    make_kind(folder, "qwen3")


def make_kind(folder: Path, kind: str, **settings: Any) -> None:
    """Write a model of a kind, with further settings."""

    def config(ids: Mapping[str, int]) -> Mapping[str, Any]:
        model_type, *_ = kind.split()
        return {"model_type": model_type, "vocab_size": len(ids), **TEXT, **KINDS.get(kind, {}), **settings}

    save(folder, config=config, special={}, chat=CHATML)
