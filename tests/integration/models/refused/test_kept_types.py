"""A model of bfloat16 is refused where transformers keeps weights in float32, and has transformers' types elsewhere."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from autotune.model_shape import model_shape
from tests.values.parameters import parameters
from tests.values.saved_models import saved_model
from trials.errors import ModelError
from trials.job import ModelSection
from trials.model.skeleton import build_skeleton, load_config
from trials.model.weights import WeightFiles, read_weights

SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    **SIZES, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 16, "n_group": 2, "topk_group": 1, **ROUTED,
}  # fmt: skip
KEPT: dict[str, dict[str, Any]] = {
    "glm4_moe": {**SIZES, **ROUTED},
    "solar_open": {**SIZES, **ROUTED},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "exaone_moe": {**SIZES, **EXPERTS},
    "ernie4_5_moe": {
        **SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1,
    },
}  # fmt: skip
SAME: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**SIZES, **EXPERTS},
    "gemma3_text": SIZES,
    "kolibri1": {
        **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
}  # fmt: skip
"""The last one has a buffer in float32, which the engine leaves as it is."""


def section(folder: Path, dtype: str) -> ModelSection:
    return ModelSection.model_validate({"path": str(folder), "dtype": dtype})


def types_of_transformers(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("kind", parameters({kind: kind for kind in KEPT}, short=("glm4_moe", "ernie4_5_moe")))
def test_a_model_with_weights_in_float32_is_refused_in_bfloat16_alone(kind: str, shallow: Path, tmp_path: Path) -> None:
    saved_model(shallow, tmp_path, text={"model_type": kind, **KEPT[kind]})
    kept = [name for name, each in types_of_transformers(tmp_path).items() if each.dtype == torch.float32]
    with pytest.raises(ModelError, match=r"model.dtype is bfloat16, but .* set model.dtype to float32") as refused:
        model_shape(section(tmp_path, "bfloat16"))
    (shown,) = re.findall(r"such as (\S+),", str(refused.value))
    assert any(name.startswith(shown) for name in kept)
    assert model_shape(section(tmp_path, "float32")).dtype == "float32"


@pytest.mark.parametrize("kind", parameters({kind: kind for kind in SAME}, short=("kolibri1",)))
def test_the_other_models_have_the_types_and_weights_that_transformers_loads(
    kind: str, shallow: Path, tmp_path: Path
) -> None:
    model = saved_model(shallow, tmp_path, text={"model_type": kind, **SAME[kind]})
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.add_(torch.rand(len(buffer)))
    model.save_pretrained(tmp_path)
    expected = types_of_transformers(tmp_path)
    model_shape(section(tmp_path, "bfloat16"))
    skeleton = build_skeleton(load_config(str(tmp_path)), torch.bfloat16)
    read_weights(skeleton.model, skeleton.chain.parts, WeightFiles(tmp_path, skeleton), torch.device("cpu"))
    for part in skeleton.chain.parts:
        module = skeleton.model.get_submodule(part)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            assert tensor.dtype == expected[f"{part}.{name}"].dtype, f"{part}.{name}"
            assert torch.equal(tensor, expected[f"{part}.{name}"]), f"{part}.{name}"
    is_kept = {name for name, each in expected.items() if name.endswith("correction_bias") and each.dtype.itemsize == 4}
    assert bool(is_kept) == (kind == "kolibri1")
