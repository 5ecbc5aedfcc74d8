"""A model that no family takes is refused before anything is measured, with the reason where its structure shows it."""

from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tests.programs.users import JobFile, databases, refusal
from trials.errors import ModelError
from trials.model.family import find_family, load_family

REASONS = {
    "mllama": "cross-attention layers between its language layers (cross_attention_layers) need the image states",
    "idefics": "cross-attention layers between its language layers (cross_layer_interval) need the image states",
    "vision-encoder-decoder": "it is an encoder and a decoder",
    "florence2": "it is an encoder and a decoder",
    "udop": "it is an encoder and a decoder",
    "pix2struct": "it is an encoder and a decoder",
    "t5gemma2": "it is an encoder and a decoder",
    "paligemma": "a prompt's tokens attend to each other (use_bidirectional_attention)",
    "blip-2": "a resampler with attention (qformer_config) lies between its vision tower and its language model",
    "idefics2": "a resampler with attention (perceiver_config) lies between its vision tower",
    "kosmos-2": "a resampler with attention (latent_query_num) lies between its vision tower",
    "aria": "a resampler with attention (projector_patch_to_query_dict) lies between its vision tower",
    "qwen2_5_omni": "it consists of several models that call each other (thinker_config)",
    "qwen2_5_omni_thinker": "it has an audio tower (audio_config)",
    "gemma3n": "it has an audio tower (audio_config)",
    "evolla": "it is made for proteins",
    "chameleon": "its images become tokens of a VQ model (vq_config)",
    "deepseek_vl_hybrid": "it has a second vision tower (high_res_vision_config)",
    "llava_next_video": "it is made for videos (video_seq_length)",
    "qwen3_5": "layers of type 'linear_attention' carry a state over the tokens",
    "fast_vlm": "its vision tower is one of timm (timm_wrapper)",
    "fuyu": "",
    "whisper": "it is an encoder and a decoder",
    "bert": "",
}
"""Model type -> what the message says of it; empty where its configuration shows nothing."""


@pytest.mark.parametrize("model_type", sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *REASONS}))
def test_a_model_that_no_family_takes_is_refused_with_the_reason(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    if find_family(config):
        assert model_type not in REASONS
        return
    with pytest.raises(ModelError) as caught:
        load_family(config)
    message = str(caught.value)
    assert message.startswith(f"model type {model_type!r} is not supported")
    assert "; supported are: " in message
    why = REASONS.get(model_type)
    assert why is None or (f"is not supported: {why}" if why else "is not supported; supp") in message


@pytest.mark.parametrize("model_type", REASONS)
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
