"""The language layers of a pack, for decoders built like Llama and Qwen2."""

from itertools import pairwise

import torch
from torch import nn

from trials.model.family import LanguageRunner


def language_runner(rotary: nn.Module, states: torch.Tensor, position_ids: torch.Tensor) -> LanguageRunner:
    """Implement `Family.language_runner` for layers that take `position_embeddings` from one rotary module."""
    positions = position_ids.unsqueeze(0)
    starts = torch.nonzero(position_ids == 0).flatten().tolist()
    # transformers hands keywords that it does not know on to the attention: `packed_attention` takes the lengths of the
    # samples, so that no mask of [T, T] is built.
    shared = {
        "attention_mask": None,
        "position_ids": positions,
        "position_embeddings": rotary(states, positions),
        "packed_lengths": [stop - start for start, stop in pairwise([*starts, position_ids.numel()])],
    }

    def run(layer: nn.Module, states: torch.Tensor) -> torch.Tensor:
        output = layer(states, **shared)
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result

    return run
