"""The language layers of a pack, for decoders built like Llama and Qwen2."""

import torch
from torch import nn

from trials.model.attention import sample_lengths
from trials.model.family import LanguageRunner


def language_runner(rotary: nn.Module, states: torch.Tensor, position_ids: torch.Tensor) -> LanguageRunner:
    """Implement `Family.language_runner` for layers that take `position_embeddings` from one rotary module."""
    positions = position_ids.unsqueeze(0)
    # `packed_attention` gets the lengths by keyword; no mask of [T, T] is built.
    shared = {
        "attention_mask": None,
        "position_ids": positions,
        "position_embeddings": rotary(states, positions),
        "packed_lengths": sample_lengths(position_ids),
    }

    def run(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
        output = layer(states, **shared)
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result

    return run
