"""Configurations that differ from another one in one setting, for every setting that it has."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from trials.model.shrunk import CONTEXT

SHORTER, WHOLE, LONGER = CONTEXT - 2, CONTEXT + 4, 2 * CONTEXT + 4
"""Contexts: of the small samples without images one is between the last two, and the others are below all."""
_SCALED = {"factor": 4.0, "original_max_position_embeddings": SHORTER}
_POSITIONS: tuple[Mapping[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 100.0},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {**_SCALED, "rope_type": "dynamic"},
    {**_SCALED, "rope_type": "dynamic", "original_max_position_embeddings": LONGER},
    {**_SCALED, "rope_type": "yarn"},
    {**_SCALED, "rope_type": "yarn", "attention_factor": 1.7, "beta_fast": 16, "beta_slow": 2},
    {**_SCALED, "rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False},
    {**_SCALED, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {**_SCALED, "rope_type": "longrope"},
    {**_SCALED, "rope_type": "longrope", "original_max_position_embeddings": LONGER},
)
_KEPT = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
_NEVER = re.compile(r"^(model_type|architectures|transformers_version|vocab_size|initializer_range)$|^dtype$|token_i")
"""Names of what is no form of a model, and sizes and ids that samples depend on."""


def changed(settings: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name of a setting, settings with another value of it); sections other than of positions stay."""
    for name, value in settings.items():
        if not _NEVER.search(name):
            for other in _others(name, value, settings):
                if other != value or type(other) is not type(value):
                    yield name, {**settings, name: other}


def _others(name: str, value: Any, settings: Mapping[str, Any]) -> Iterator[Any]:
    """Yield other values, which show: far from the usual one, where that is near what does nothing."""
    match value:
        case dict() if name == "rope_parameters":
            yield from _positions(value, settings)
        case bool():
            yield not value
        case str() if re.search(r"act(ivation)?(_function|_fn)?$", name):
            # Rounding would turn single rows of ReLU on or off, and is all that is left of the slope of a large tanh.
            yield "gelu" if value == "silu" else "silu"
        case str() if value in ("full", "default"):
            yield "default" if value == "full" else "full"
        case int() | float() | None:
            yield _number(name, value)
        case list() if name == "layer_types":
            kinds = sorted({*value, "full_attention", "sliding_attention"})
            yield [kinds[number % len(kinds)] for number in range(len(value))]
        case list():
            yield from (value[::-1], value[:1])


def _number(name: str, value: float | None) -> float:
    if value is None:
        return 2
    if re.search(r"drop|jitter", name):
        return 0.3
    if isinstance(value, int):
        return value // 2 if value > 1 else value - 1
    return 0.5 if name.endswith("eps") else 1.7 * value or 0.3


def _positions(value: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every kind of rotary positions, for each type of layer where types have kinds of their own."""
    types = [kind for kind, inner in value.items() if isinstance(inner, dict)]
    for inner in [value[kind] for kind in types] or [value]:
        kept = {name: inner[name] for name in _KEPT if name in inner}
        for given in _POSITIONS:
            made = {"rope_theta": 10_000.0, **kept, **given}
            if made["rope_type"] == "longrope":
                heads = settings.get("num_attention_heads") or settings["num_heads"]
                width = settings.get("head_dim") or settings["hidden_size"] // heads
                half = int(width * made.get("partial_rotary_factor", 1.0)) // 2
                made |= {"short_factor": [1.1] * half, "long_factor": [2.0 + number for number in range(half)]}
            yield {**value, **{kind: made for kind in types if value[kind] is inner}} if types else made
