"""A model that no family takes is refused before anything is measured, with the reason where its structure shows it."""

import re
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.programs.users import JobFile, databases, refusal
from tests.values.parameters import parameters
from trials.errors import ModelError
from trials.job import ModelSection
from trials.model.family import find_family, load_family
from trials.model.plain.parity import check_parity
from trials.model.skeleton import build_skeleton, load_config

REASONS = {
    "mllama": "cross-attention layers between its language layers (cross_attention_layers) need the image states",
    "idefics": "cross-attention layers between its language layers (cross_layer_interval) need the image states",
    "vision-encoder-decoder": "it is an encoder and a decoder",
    "florence2": "it is an encoder and a decoder",
    "udop": "it is an encoder and a decoder",
    "pix2struct": "it is an encoder and a decoder",
    "t5gemma2": "it is an encoder and a decoder",
    "blip-2": "a resampler with attention (qformer_config) lies between its vision tower and its language model",
    "idefics2": "a resampler with attention (perceiver_config) lies between its vision tower",
    "kosmos-2": "a resampler with attention (latent_query_num) lies between its vision tower",
    "aria": "a resampler with attention (projector_patch_to_query_dict) lies between its vision tower",
    "qwen2_5_omni": "it consists of several models that call each other (thinker_config)",
    "qwen2_5_omni_thinker": "it has an audio tower (audio_config)",
    "gemma3n": "its layers take inputs of their own for each token (hidden_size_per_layer_input)",
    "evolla": "it is made for proteins",
    "chameleon": "its images become tokens of a VQ model (vq_config)",
    "deepseek_vl_hybrid": "it has a second vision tower (high_res_vision_config)",
    "video_llava": "it is made for videos (video_seq_length)",
    "qwen3_5": "layers of type 'linear_attention' carry a state over the tokens",
    "fast_vlm": "its vision tower is one of timm (timm_wrapper)",
    "fuyu": "it has no norm next to its word embedding",
    "whisper": "it is an encoder and a decoder",
    "bert": "it is an encoder, whose tokens see those behind them (is_decoder is false)",
    "gpt_neox": "it has no norm next to its word embedding",
    "rwkv": "its layers carry a state over the tokens, and so over the samples of a pack",
    "xlstm": "its layers carry a state over the tokens, and so over the samples of a pack",
    "jamba": "layers of type 'linear_attention' carry a state over the tokens",
    "lfm3": "layers of type 'conv' carry a state over the tokens",
    "trocr": "cross-attention in its language model (layers.0.encoder_attn, a TrOCRAttention)",
    "blt": "cross-attention in its language model (cross_attn_layers, a ModuleList)",
    "ernie4_5_vl_moe": "a resampler with attention (model.resampler_model) lies between its vision tower",
    "vibevoice_asr": "it has an audio tower (acoustic_tokenizer_encoder_config)",
    "moshi": "it has an audio tower (audio_encoder_config)",
    "gemma3n_text": "its layers take inputs of their own for each token (hidden_size_per_layer_input)",
    "gemma4_unified_text": "its layers have sizes of their own (per_layer_config)",
    "deepseek_v32": "layers of type 'indexed_attention' choose in a way of their own which tokens are seen",
    "llama4": "layers of type 'chunked_attention' choose in a way of their own which tokens are seen",
    "dbrx": "its configuration has a section (attn_config)",
    "clip": "transformers has it neither as a model of images and text",
    "qianfan_ocr": "no family knows how its vision tower 'qianfan_ocr_vision' and the language model",
}
"""Model type -> what the message says of it."""
SHORT = (
    "mllama", "florence2", "blip-2", "qwen2_5_omni", "bert", "gpt_neox", "rwkv", "lfm3", "trocr", "ernie4_5_vl_moe",
    "vibevoice_asr", "gemma3n_text", "gemma4_unified_text", "deepseek_v32", "dbrx", "clip", "qianfan_ocr",
)  # fmt: skip
"""One or two of each kind"""
BY_COMMAND = ("mllama",)
OF_TRANSFORMERS = re.compile(r"cannot be (built|checked)|correct \w+|divide its hidden_size|cannot be (pooled|merged)")
"""Default sizes do not fit each other: transformers or the family says so."""


def types() -> dict[str, str]:
    return {each: each for each in sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *REASONS})}


@pytest.mark.parametrize("model_type", parameters(types(), short=SHORT))
def test_a_model_that_no_family_takes_is_refused_with_the_reason(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    if find_family(config):
        assert model_type not in REASONS
        return
    with pytest.raises(ModelError) as caught:
        load_family(config)
    message = str(caught.value)
    assert message.startswith(f"model type {model_type!r} is not supported: ")
    assert "; supported are: " in message
    assert REASONS.get(model_type, "") in message


@pytest.mark.long
@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_a_causal_model_is_compared_or_refused_with_the_reason(model_type: str, tmp_path: Path) -> None:
    try:
        AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    except StrictDataclassClassValidationError:
        pytest.skip("its default settings contradict each other")
    try:
        build_skeleton(load_config(str(tmp_path)), torch.float32)
        check_parity(ModelSection(path=str(tmp_path), weights="random"))
    except ModelError as error:
        message = str(error)
        assert "\n" not in message
        assert "computed differently" not in message
        assert OF_TRANSFORMERS.search(message) or "Error: " not in message


@pytest.mark.parametrize("model_type", parameters({each: each for each in REASONS}, short=BY_COMMAND))
def test_a_command_refuses_it_before_it_measures(model_type: str, job: JobFile, home: Path, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path / "other")
    job.spoil(model__path=str(tmp_path / "other"))
    for command in (["tune", str(job.path)], ["launch", str(job.path), "--dry-run"]):
        code, message = refusal(*command)
        assert code == 1
        assert f"model type {model_type!r} is not supported" in message
        assert REASONS[model_type] in message
        assert "\n" not in message
    assert not databases(home)
