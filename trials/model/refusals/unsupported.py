"""Why models of a configuration cannot be cut into stages, as far as the configuration shows it."""

import re
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from trials.errors import ModelError
from trials.model.refusals.structure import STATE, text_of

LIKE_LLAMA = "use a model whose language model is built like Llama or Qwen2"
_CROSS_ATTENTION = ("cross_attention_layers", "cross_layer_interval", "add_cross_attention")
_RESAMPLERS = ("qformer_config", "perceiver_config", "latent_query_num", "projector_patch_to_query_dict")
_FOLLOWED = frozenset(("full_attention", "sliding_attention"))
"""Types of layers whose tokens see those before them, or a window of these."""
_RECURRENT = re.compile(r"linear|conv|mamba|recurrent|hybrid|ssm|delta|gla")
"""Types of layers that carry a state from token to token."""
_PROMPTED = ("paligemma",)
"""Models of which a pack says which tokens are the prompt."""
_SOUND = re.compile(r"^(audio|acoustic|speech|sound)_.*config$")
_SECTIONS = {
    "thinker_config": "it consists of several models that call each other (thinker_config)",
    "dit_config": "it consists of several models that call each other (dit_config)",
    "protein_encoder_config": "it is made for proteins (protein_encoder_config), and samples hold images",
    "vq_config": "its images become tokens of a VQ model (vq_config), which is trained apart from it",
    "high_res_vision_config": "it has a second vision tower (high_res_vision_config), and a chain of layers has one",
    "video_seq_length": "it is made for videos (video_seq_length), which are not supported for it",
}


def reason(config: PretrainedConfig) -> str | None:
    """Return why no family takes models of this structure; None where the configuration does not show it."""
    # One of an encoder and a decoder may have two text configurations.
    is_two = getattr(config, "is_encoder_decoder", False)
    text = config if is_two else text_of(config)
    if is_two or getattr(text, "is_encoder_decoder", False):
        return "it is an encoder and a decoder, and every decoder layer needs the encoder's states"
    return of_language(text) or _of_parts(config)


def of_language(text: PretrainedConfig, *, prompted: bool = False) -> str | None:
    """Return what cannot be in a pack that passes through stages; `prompted` says that it shows the prompt."""
    cross = _first(text, _CROSS_ATTENTION)
    if cross:
        return f"cross-attention layers between its language layers ({cross}) need the image states at every depth"
    if not prompted and getattr(text, "use_bidirectional_attention", None) is True:
        return (
            "a prompt's tokens attend to each other (use_bidirectional_attention), and a pack does not say which "
            "tokens are the prompt"
        )
    return _of_layers(text)


def _of_layers(text: PretrainedConfig) -> str | None:
    """Return what layers do that a stage does not, or that costs of one layer do not show."""
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _FOLLOWED)
    if recurrent := [each for each in others if _RECURRENT.search(each)]:
        return f"layers of type {recurrent[0]!r} {STATE}"
    if others:
        return f"layers of type {others[0]!r} choose in a way of their own which tokens are seen"
    if getattr(text, "hidden_size_per_layer_input", None):
        return "its layers take inputs of their own for each token (hidden_size_per_layer_input)"
    if "per_layer_config" in text.to_dict():
        return "its layers have sizes of their own (per_layer_config), and costs are measured of layers of one size"
    return None


def _of_parts(config: PretrainedConfig) -> str | None:
    """Return the part that is not one of a vision tower, a projector and a language model, or replaces one of them."""
    section = _first(config, tuple(_SECTIONS))
    if section:
        return _SECTIONS[section]
    if sound := _first(config, tuple(name for name in vars(config) if _SOUND.search(name))):
        return f"it has an audio tower ({sound}), and no sample has sound"
    resampler = _first(config, _RESAMPLERS)
    if resampler:
        return f"a resampler with attention ({resampler}) lies between its vision tower and its language model"
    if getattr(getattr(config, "vision_config", None), "model_type", None) == "timm_wrapper":
        return "its vision tower is one of timm (timm_wrapper), whose layers have no common interface"
    return None


def check_language(config: PretrainedConfig) -> None:
    """Raise ModelError for a language model that cannot be in stages, whatever its vision side is."""
    text = config.get_text_config()
    if (why := of_language(text, prompted=config.model_type in _PROMPTED)) is not None:
        raise ModelError(f"the language model {text.model_type!r} is not supported: {why}; {LIKE_LLAMA}")


def check_dropout(config: PretrainedConfig) -> None:
    """Raise ModelError for dropout between the word embedding and the first language layer."""
    if rate := getattr(config.get_text_config(), "embedding_dropout", 0):
        raise ModelError(f"embedding_dropout is {rate}, which stages do not apply; set it to 0 in config.json")


def check_code(settings: Mapping[str, Any]) -> None:
    """Raise ModelError for a model of an unknown type whose code comes with it.

    transformers would ask to trust that code, which does not help: it can be of any structure.
    """
    model_type = settings.get("model_type")
    if settings.get("auto_map") and isinstance(model_type, str) and model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"model_type {model_type!r} is not supported: its code comes with the model (auto_map) and can be of any "
            "structure; use a model whose code is in transformers, such as one whose name ends in -hf"
        )


def check_quantized(settings: Mapping[str, Any]) -> None:
    """Raise ModelError for a model with quantized weights, which are no parameters that can be trained."""
    for section in (settings, *(each for each in settings.values() if isinstance(each, dict))):
        if quantized := section.get("quantization_config"):
            method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
            raise ModelError(
                f"the model's weights are quantized (quantization_config: {method!a:.40}), and such weights cannot be "
                "trained; give the model that it was made from. If they are not, remove quantization_config"
            )


def _first(config: PretrainedConfig, names: tuple[str, ...]) -> str | None:
    """Return the first of the settings that the configuration has."""
    return next((name for name in names if getattr(config, name, None)), None)
