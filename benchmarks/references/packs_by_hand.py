"""Packs and their attention, for the plain packed loop. Imports nothing from autotune."""

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

_LENGTHS: list[int] = []
"""Of the samples of the pack that runs."""
_ENDS: list[torch.Tensor] = []
"""The ends of these samples behind a 0, on the device."""


def attend_to(lengths: Sequence[int], ends: torch.Tensor) -> None:
    """Set the samples of the pack that runs next."""
    _LENGTHS[:], _ENDS[:] = lengths, [ends]


def per_sample(
    _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Compute the causal attention of each sample of a pack by itself."""
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    parts = zip(*(each.split(_LENGTHS, dim=2) for each in (query, key, value)), strict=True)
    found = [scaled_dot_product_attention(q, k, v, is_causal=True, scale=options["scaling"]) for q, k, v in parts]
    return torch.cat(found, dim=2).transpose(1, 2), None


def packed_flash(
    _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Compute the attention of all samples, or of all windows of images, by one call of FlashAttention."""
    ends, longest = options.get("cu_seq_lens_q"), options.get("max_length_q")
    window = (-1, -1)
    if ends is None:  # of the language model
        ends, longest, window = _ENDS[0], max(_LENGTHS), (-1, 0)
    varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    found = varlen.varlen_attn(
        *(each[0].transpose(0, 1) for each in (query, key, value)),
        ends,
        ends,
        longest,
        longest,
        scale=options["scaling"],
        window_size=window,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return found[None], None


AttentionInterface.register("per_sample", per_sample)
AttentionInterface.register("packed_flash", packed_flash)


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return packs of at most `capacity`, longest samples first; a longer sample is a pack by itself."""
    packs, room = list[list[int]](), list[int]()
    for number in sorted(range(len(lengths)), key=lambda one: -lengths[one]):
        place = next((pack for pack, left in enumerate(room) if left >= lengths[number]), None)
        if place is None:
            packs.append([])
            room.append(capacity)
            place = len(packs) - 1
        packs[place].append(number)
        room[place] -= lengths[number]
    return packs
