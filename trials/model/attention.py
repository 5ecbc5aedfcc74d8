"""Causal attention inside each sample of a pack, and none between samples."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED_ATTENTION = "autotune_packed"


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001 (the interface passes it)
    *,
    packed_lengths: list[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of query [1, heads, T, d] to key and value [1, kv heads, T, d] inside each of `packed_lengths`.

    One call per sample: the work is the sum of the squared lengths, not the square of their sum.
    """
    if sliding := sliding_window or getattr(module, "sliding_window", None):  # models hand it over in either way
        longest = max(packed_lengths)
        if longest > sliding:
            raise ValueError(f"a sample of {longest} tokens exceeds the model's sliding window of {sliding}")
    blocks = [
        scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=True)
        for q, k, v in zip(*(tensor.split(packed_lengths, dim=2) for tensor in (query, key, value)), strict=True)
    ]
    return torch.cat(blocks, dim=2).transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
