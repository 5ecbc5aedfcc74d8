"""A model's configuration with few narrow layers: the same kinds of layers, in seconds instead of hours."""

import json
import re
from typing import Any

import torch
from transformers import PretrainedConfig

from trials.model.layer_kinds import layers_of_every_kind
from trials.model.skeleton import build_skeleton

# A choice: enough ids for short random texts, and a tiny head.
VOCABULARY = 64
CONTEXT = 8
"""Tokens of the shortest context length; samples on both sides of it show positions that depend on their length."""
# Choices: the least sizes with which experts still differ, and a window that is shorter than the samples.
_LARGEST = (
    (re.compile(r"intermediate_size$"), 128),
    (re.compile(r"^(num_experts|num_local_experts|n_routed_experts)$"), 16),
    (re.compile(r"^num_experts_per_tok$"), 2),
    (re.compile(r"^sliding_window$"), 4),
)
_BASE = "dim_model_base"
_CONTEXT = re.compile(r"max_position_embeddings$|^attention_chunk_size$")


def shrunk(config: PretrainedConfig, context: int = CONTEXT) -> PretrainedConfig:
    """Return `config` with the first layers that show every kind, few heads and tokens, and a `context` of few tokens.

    Widths of heads stay, and with them whatever a configuration says of rotary frequencies.
    """
    skeleton = build_skeleton(config, torch.float32)
    document = json.loads(config.to_json_string(use_diff=False))
    # The configuration of a model for text alone is that of its language model.
    text = document.get("text_config", document)
    shorten(text, layers_of_every_kind(skeleton.modules(skeleton.chain.language_layers)))
    narrow(text)
    contexts = _contexts(text)
    if contexts:
        _scale_contexts(text, context / min(contexts))
    text["vocab_size"] = VOCABULARY
    for name, value in text.items():
        if name.endswith("token_id") and isinstance(value, int):
            text[name] = min(value, VOCABULARY - 1)
    skeleton.family.shrink_vision(document, layers_of_every_kind(skeleton.modules(skeleton.chain.vision_layers)))
    return type(config).from_dict(document)


def shortest_context(config: PretrainedConfig) -> int | None:
    """Return the tokens of a sample beyond which a model computes in another way; None where it never does."""
    document = json.loads(config.to_json_string(use_diff=False))
    return min(_contexts(document.get("text_config", document)), default=None)


def shorten(settings: dict[str, Any], layers: int) -> None:
    """Keep the first `layers` layers, and their entries of every list with one per layer."""
    before = settings["num_hidden_layers"]
    for name, value in settings.items():
        if isinstance(value, list | tuple) and len(value) == before:
            settings[name] = value[:layers]
    settings["num_hidden_layers"] = layers


def narrow(settings: dict[str, Any]) -> None:
    """Keep two groups of heads at most, of the same width, and whether groups have one head or several."""
    heads = settings["num_attention_heads"]
    groups = settings.get("num_key_value_heads") or heads
    width = settings.get("head_dim") or settings["hidden_size"] // heads
    # One head for each group or several are different paths of the attention, so that this is kept.
    few_groups = min(2, groups)
    few_heads = few_groups if heads == groups else 2 * few_groups
    hidden = few_heads * width
    if settings.get(_BASE):  # MiniCPM3 divides by the ratio of both widths; one that happened to be 1 would not show.
        settings[_BASE] = max(1, round(settings[_BASE] * hidden / settings["hidden_size"]))
    settings.update(num_attention_heads=few_heads, hidden_size=hidden)
    if settings.get("num_key_value_heads"):
        settings["num_key_value_heads"] = few_groups
    for name, value in settings.items():
        most = next((most for pattern, most in _LARGEST if pattern.search(name)), None)
        if most is not None and isinstance(value, int):
            settings[name] = min(value, most)


def _contexts(settings: dict[str, Any]) -> list[int]:
    """Return every length, also of rotary positions, beyond which a model computes in another way."""
    inner = [length for value in settings.values() if isinstance(value, dict) for length in _contexts(value)]
    return inner + [value for name, value in settings.items() if _CONTEXT.search(name) and isinstance(value, int)]


def _scale_contexts(settings: dict[str, Any], scale: float) -> None:
    for name, value in settings.items():
        if isinstance(value, dict):
            _scale_contexts(value, scale)
        elif _CONTEXT.search(name) and isinstance(value, int):
            settings[name] = round(value * scale)
