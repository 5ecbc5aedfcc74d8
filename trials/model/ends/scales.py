"""Factors and caps by which configurations of language models change states and logits between their parts.

Those of logits belong to the causal models of transformers. Its models of images and text leave them out where they
take such a language model, but for PaliGemma, which caps logits.
"""

import torch
from transformers import PretrainedConfig

_CAPPING = ("paligemma",)
_MULTIPLYING = ("hyperclovax",)
"""Models that multiply logits by what others divide them by."""
_BEFORE_HEAD = ("minicpm3",)
"""Models that divide the states before the head instead."""


def before_layers(config: PretrainedConfig, states: torch.Tensor) -> torch.Tensor:
    """Return the states of the first language layer for those of words and images."""
    factor: float | None = getattr(config.get_text_config(), "embedding_multiplier", None)
    return states if factor in (None, 1) else states * factor


def before_head(config: PretrainedConfig, states: torch.Tensor) -> torch.Tensor:
    """Return what the head takes of the states behind the last norm."""
    divisor: float = config.logits_scaling if config.model_type in _BEFORE_HEAD else 1
    return states if divisor == 1 else states / divisor


def behind_head(config: PretrainedConfig, logits: torch.Tensor) -> torch.Tensor:
    """Return the logits of the loss for those of the head."""
    text = config.get_text_config()
    if text is config:
        logits = _scaled(config, logits)
    cap = getattr(text, "final_logit_softcapping", None)
    if cap is not None and (text is config or config.model_type in _CAPPING):
        logits = torch.tanh(logits / cap) * cap
    return logits


def _scaled(config: PretrainedConfig, logits: torch.Tensor) -> torch.Tensor:
    divisor = None if config.model_type in _BEFORE_HEAD else getattr(config, "logits_scaling", None)
    if divisor not in (None, 1):
        logits = logits * divisor if config.model_type in _MULTIPLYING else logits / divisor
    factor: float | None = getattr(config, "logit_scale", None)
    return logits if factor in (None, 1) else logits * factor
