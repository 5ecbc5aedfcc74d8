"""Why a model cannot be cut into stages, as the class and the modules show that transformers builds of it."""

import copy
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

_CROSS_ATTENTION = re.compile(r"cross_?att|encoder_(decoder_)?att")
_OWN_INPUTS = re.compile(r"per_layer_(input|embed|model)|embed\w*_per_layer")
_RESAMPLER = re.compile(r"resampler|perceiver|q_?former|abstractor")
_QUERIES = re.compile(r"(^|[._])(latents?|quer(y|ies)|(query|latent)_(tokens?|query|embeds?))$")
"""Learned queries, which are parameters of no layer"""
STATE = "carry a state over the tokens, and so over the samples of a pack"


def text_of(config: PretrainedConfig) -> PretrainedConfig:
    """Return the section of the language model; the whole of a configuration without one, or with several."""
    with suppress(ValueError):
        text = config.get_text_config()
        # A section that the model type does not know stays as it is in the file.
        return text if isinstance(text, PretrainedConfig) else config
    return config


def of_class(config: PretrainedConfig) -> str | None:
    """Return why no family takes models of the class that transformers has for this configuration; None if it may."""
    kind = _auto_class(config)
    # Set where the states of a generation cannot be cut back to fewer tokens, as those of attention can.
    if kind and getattr(kind._model_mapping[type(config)], "_is_stateful", False):
        return f"its layers {STATE}"
    return None


def of_modules(config: PretrainedConfig) -> str:
    """Return why no family takes a model, by its modules, or else what a family would have to know of it."""
    kind = _auto_class(config)
    if kind is None:
        return (
            "transformers has it neither as a model of images and text (AutoModelForImageTextToText) nor as a causal "
            "language model (AutoModelForCausalLM)"
        )
    # Default sizes may fit no model; what is known without one is said then.
    with suppress(Exception), torch.device("meta"):
        model = kind.from_config(copy.deepcopy(config))
        known = (of_language(model), _between_towers(model), _of_encoder(config, model), of_ends(model))
        if (why := next(filter(None, known), None)) is not None:
            return why
    return _unknown_section(config) if kind is AutoModelForCausalLM else _unknown_tower(config)


def of_language(model: PreTrainedModel) -> str | None:
    """Return why the language layers of a built model cannot pass a pack through stages; None if they may."""
    for name, module in _decoder(model).named_modules():
        kind = type(module).__name__
        if _CROSS_ATTENTION.search(name.lower()) or getattr(module, "is_cross_attention", False) is True:
            return f"cross-attention in its language model ({name}, a {kind}) needs the states of another part"
        if _OWN_INPUTS.search(name):
            return f"its layers take inputs of their own for each token ({name})"
        if isinstance(module, nn.Conv1d):
            return f"a convolution over the tokens ({name}) goes over the ends of the samples of a pack"
    return None


def of_ends(model: PreTrainedModel) -> str | None:
    """Return what the language model of a built model lacks of what the last stage, or every one, holds."""
    decoder = _around_embedding(model)[0]
    lacking = [name for name in ("norm", "rotary_emb") if not hasattr(decoder, name)]
    return f"it has no {' and no '.join(lacking)} next to its word embedding" if lacking else None


def _decoder(model: PreTrainedModel) -> nn.Module:
    """Return the innermost module around the word embedding that has a list of layers."""
    around = _around_embedding(model)
    lists = (any(isinstance(each, nn.ModuleList) for each in module.modules()) for module in around)
    return next((module for module, has_list in zip(around, lists, strict=True) if has_list), model)


def _around_embedding(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that the word embedding lies in, the innermost first."""
    embedding = model.get_input_embeddings()
    names = next(name for name, module in model.named_modules() if module is embedding).split(".")
    return [model.get_submodule(".".join(names[:depth])) for depth in reversed(range(len(names)))]


def _of_encoder(config: PretrainedConfig, model: PreTrainedModel) -> str | None:
    """Return that tokens see those behind them, where layers say so."""
    causal = {is_causal for each in model.modules() if isinstance(is_causal := getattr(each, "is_causal", None), bool)}
    if getattr(config, "is_decoder", None) is False and causal == {False}:
        return "it is an encoder, whose tokens see those behind them (is_decoder is false)"
    return None


def _between_towers(model: PreTrainedModel) -> str | None:
    """Return the attention with learned queries that lies between two towers."""
    named: Iterator[tuple[str, str]] = ((name, type(module).__name__) for name, module in model.named_modules())
    found = next((name for name, kind in named if _RESAMPLER.search(kind.lower())), None)
    found = found or next((name for name, _ in model.named_parameters() if _QUERIES.search(name)), None)
    return found and f"a resampler with attention ({found}) lies between its vision tower and its language model"


def _unknown_section(config: PretrainedConfig) -> str:
    if config.sub_configs:
        return f"its configuration has a section ({min(config.sub_configs)}) that a model of text alone has not here"
    return "its is_decoder is false, as that of an encoder"


def _unknown_tower(config: PretrainedConfig) -> str:
    towers = [name for name in ("vision_config", "visual_config") if name in config.sub_configs]
    text = text_of(config).model_type
    if not towers:
        return f"no family knows how its images reach the language model {text!r} without a tower (vision_config)"
    tower = getattr(getattr(config, towers[0]), "model_type", None)
    return (
        f"no family knows how its vision tower {tower!r} and the language model {text!r} are joined, which "
        f"would need a family of its own"
    )


def _auto_class(config: PretrainedConfig) -> Any:
    """Return the class of transformers that builds a model of this configuration, images first."""
    kinds: tuple[Any, ...] = (AutoModelForImageTextToText, AutoModelForCausalLM)
    return next((kind for kind in kinds if type(config) in kind._model_mapping), None)
