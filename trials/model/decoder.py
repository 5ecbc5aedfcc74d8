"""The language layers of a pack, for decoders built like Llama and Qwen2."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trials.data.tokens import PackTokens
from trials.model.attention.samples import PackedSamples
from trials.model.family import LayerRunner
from trials.sharing.group import SharingGroup

_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary positions whose frequencies depend on the length of a sample."""


def language_runner(
    model: PreTrainedModel,  # noqa: ARG001 (the Protocol has it)
    rotary: Any,
    states: torch.Tensor,
    tokens: PackTokens,
    sharing: SharingGroup,
) -> LayerRunner:
    """Implement `Family.language_runner` for causal attention."""
    return decoder_runner(rotary, states, tokens, PackedSamples(tokens.lengths), sharing)


def decoder_runner(
    rotary: Any, states: torch.Tensor, tokens: PackTokens, samples: PackedSamples, sharing: SharingGroup
) -> LayerRunner:
    """Return what runs layers that take `position_embeddings` from one rotary module, and attend inside `samples`."""
    part = sharing.share.part(tokens.positions.shape[1])
    on_device = tokens.positions.to(states.device, non_blocking=True)

    def embedded(*which: str) -> Any:
        # Of the whole pack and cut afterwards: the frequencies of some models depend on the largest position.
        whole = _embeddings(rotary, states, positions, tokens, *which)
        if sharing.share.degree == 1:
            return whole
        # A copy: a view would keep those of the whole pack for the backward pass.
        cut = [each[..., part, :].clone() for each in (whole if isinstance(whole, tuple) else (whole,))]
        return tuple(cut) if isinstance(whole, tuple) else cut[0]

    # [1, T], or [3, 1, T] for positions in time, height and width.
    positions = on_device if len(on_device) == 1 else on_device.unsqueeze(1)
    # transformers hands keywords that it does not know on to the attention: `packed_attention` takes the samples, so
    # that no mask of [T, T] is built.
    shared = {
        "attention_mask": None,
        "position_ids": on_device[:1, part],
        "samples": samples,
        "sharing": sharing,
    }
    # Gemma 3 has frequencies of their own for each type of layer.
    types = rotary.config.layer_types if hasattr(rotary, "layer_types") else None
    embeddings = {each: embedded(each) for each in set(types)} if types else embedded()

    def run(layer: nn.Module, number: int, states: torch.Tensor) -> torch.Tensor:
        output = layer(states, position_embeddings=embeddings[types[number]] if types else embeddings, **shared)
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result

    return run


def _embeddings(rotary: Any, states: torch.Tensor, positions: torch.Tensor, tokens: PackTokens, *which: str) -> Any:
    """Return the rotary embeddings of a pack, with the frequencies that each sample has alone."""
    if getattr(rotary, "rope_type", None) not in _BY_LENGTH or int(tokens.positions.max()) + 1 < _usual_length(rotary):
        return rotary(states, positions, *which)
    samples = [_fresh(rotary)(states, part, *which) for part in positions.split(tokens.lengths, dim=-1)]
    return tuple(torch.cat(parts, dim=-2) for parts in zip(*samples, strict=True))


def _usual_length(rotary: Any) -> int:
    """Return a length of samples up to which their frequencies do not depend on it.

    Some kinds take the context before it was extended, others the whole one, whichever of them is shorter.
    """
    whole: int = rotary.original_max_seq_len
    before: int = rotary.config.rope_parameters.get("original_max_position_embeddings", whole)
    return min(whole, before)


def _fresh(rotary: Any) -> Any:
    """Return the module as before its first sample: transformers keeps the frequencies of the longest one so far."""
    rotary.max_seq_len_cached = rotary.original_max_seq_len
    rotary.inv_freq = rotary.original_inv_freq.clone()
    return rotary


def forget_samples(model: nn.Module) -> None:
    """Let each rotary module whose frequencies depend on samples be as before its first one."""
    for module in model.modules():
        if getattr(module, "rope_type", None) in _BY_LENGTH:
            _fresh(module)
