"""Mixtures of experts in a language model, as its configuration describes them."""

import re
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from trials.errors import ModelError
from trials.model.paths import parameters_at

_OF_ALL_EXPERTS = re.compile(r"\.experts\.[a-z]")


def check_experts(config: PretrainedConfig) -> None:
    """Raise ModelError for the router's auxiliary loss, and for more experts per token than a layer has."""
    text = config.get_text_config()
    if any(getattr(each, "output_router_logits", False) for each in (config, text)):
        raise ModelError(
            "output_router_logits asks for an auxiliary loss of the experts' router over all tokens and layers of a "
            "batch, of which packs and stages see only their own; set output_router_logits to false in config.json"
        )
    experts = getattr(text, "num_experts", None) or getattr(text, "n_routed_experts", None)
    chosen = getattr(text, "num_experts_per_tok", None)
    if experts and chosen is not None and not 1 <= chosen <= experts:
        raise ModelError(
            f"num_experts_per_tok is {chosen} but a layer has {experts} experts; correct it in config.json to a number "
            f"from 1 to {experts}"
        )


def count_used_parameters(model: nn.Module, paths: Iterable[str], text: Any) -> float:
    """Return the number of parameters under some paths that a token meets: of a layer's experts, those chosen for it.

    transformers keeps the experts of a layer as one tensor [experts, ...] each.
    """
    chosen = getattr(text, "num_experts_per_tok", None)
    used = 0.0
    for path in paths:
        for name, parameter in parameters_at(model, path):
            share = min(1.0, chosen / len(parameter)) if chosen and _OF_ALL_EXPERTS.search(name) else 1.0
            used += share * parameter.numel()
    return used
