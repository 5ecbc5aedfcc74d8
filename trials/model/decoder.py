"""The language layers of a pack, for decoders built like Llama and Qwen2."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trials.data.tokens import PackTokens
from trials.model.attention import SampleMasks
from trials.model.family import LayerRunner


def language_runner(
    model: PreTrainedModel,  # noqa: ARG001 (the Protocol has it)
    rotary: Any,
    states: torch.Tensor,
    tokens: PackTokens,
) -> LayerRunner:
    """Implement `Family.language_runner` for causal attention."""
    return decoder_runner(rotary, states, tokens, SampleMasks(tokens.lengths))


def decoder_runner(rotary: Any, states: torch.Tensor, tokens: PackTokens, masks: SampleMasks) -> LayerRunner:
    """Return what runs layers that take `position_embeddings` from one rotary module, under these masks."""
    # [1, T], or [3, 1, T] for positions in time, height and width.
    positions = tokens.positions if len(tokens.positions) == 1 else tokens.positions.unsqueeze(1)
    # transformers hands keywords that it does not know on to the attention: `packed_attention` takes the samples, so
    # that no mask of [T, T] is built.
    shared = {
        "attention_mask": None,
        "position_ids": tokens.positions[:1],
        "samples": masks,
    }
    # Gemma 3 has frequencies of their own for each type of layer.
    types = rotary.config.layer_types if hasattr(rotary, "layer_types") else None
    embeddings = {each: rotary(states, positions, each) for each in set(types)} if types else rotary(states, positions)

    def run(layer: nn.Module, number: int, states: torch.Tensor) -> torch.Tensor:
        output = layer(states, position_embeddings=embeddings[types[number]] if types else embeddings, **shared)
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result

    return run
