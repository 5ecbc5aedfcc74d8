"""Kernels for the attention of a pack: one call for all samples, or one call for each."""

import importlib
from typing import Any, Protocol

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from trials.model.attention.samples import PackedSamples

# Limits that torch's FlashAttention checks (aten/src/ATen/native/transformers/cuda).
_FLASH_TYPES = (torch.float16, torch.bfloat16)
_FLASH_CAPABILITY = (8, 0)
_LARGEST_FLASH_HEAD = 256
_FLASH_MULTIPLE = 8
"""Of the width of a head."""


class Kernel(Protocol):
    """Computation of attention inside each sample of a pack."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        samples: PackedSamples,
        *,
        window: int | None,
        scaling: float | None,
        dropout: float,
    ) -> torch.Tensor:
        """Return [1, heads, T, d] for query [1, heads, T, d] and key and value [1, kv heads, T, d].

        A token sees the last `window` tokens up to itself, all for None. Scores are multiplied by `scaling`, by
        d ** -0.5 for None.
        """
        ...


def kernel_for(query: torch.Tensor, value: torch.Tensor, samples: PackedSamples, dropout: float) -> Kernel:
    """Return `together` where torch's FlashAttention can compute the attention, else `one_by_one`.

    All that decides is known to the host, and the same in all layers of a tower.
    """
    fits = (
        query.device.type == "cuda"
        and query.dtype in _FLASH_TYPES
        and query.shape[-1] == value.shape[-1] <= _LARGEST_FLASH_HEAD
        and not samples.has_blocks
        and dropout == 0.0
        and torch.cuda.get_device_capability(query.device) >= _FLASH_CAPABILITY
    )
    return together if fits else one_by_one


def together(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    samples: PackedSamples,
    *,
    window: int | None,
    scaling: float | None,
    dropout: float,  # noqa: ARG001 (the Protocol has it)
) -> torch.Tensor:
    """Implement `Kernel` by one call of `torch.nn.attention.varlen.varlen_attn`, without blocks and dropout.

    It takes the ends of the samples on the device, so that neither the host nor the number of samples counts.
    """
    # Imported where it is used: it loads torch's compiler, for seconds.
    varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    size, ends = query.shape[-1], samples.ends(query.device)
    attended: torch.Tensor = varlen.varlen_attn(
        *(_rows(each) for each in (query, key, value)),
        ends,
        ends,
        samples.longest,
        samples.longest,
        scale=size**-0.5 if scaling is None else scaling,
        window_size=_window(samples, window),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[..., :size].transpose(0, 1).unsqueeze(0)


def _rows(heads: torch.Tensor) -> torch.Tensor:
    """Return [T, heads, d] of [1, heads, T, d]; d is filled up with zeros, which change no score."""
    missing = -heads.shape[-1] % _FLASH_MULTIPLE
    return (pad(heads, (0, missing)) if missing else heads)[0].transpose(0, 1)


def _window(samples: PackedSamples, window: int | None) -> tuple[int, int]:
    """Return how many tokens before and behind itself a token sees; -1 for all."""
    if not samples.causal:
        return -1, -1
    return (-1, 0) if window is None or window >= samples.longest else (window - 1, 0)


def one_by_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    samples: PackedSamples,
    *,
    window: int | None,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Implement `Kernel` by one call for each sample.

    The work is the sum of the squared lengths, not the square of their sum.
    """
    masks = samples.masks(window, query.device)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and any(mask is not None for mask in masks):
        # With a mask, grouped heads are left to the kernel that holds all scores in memory (torch 2.13).
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    parts = zip(*(tensor.split(samples.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    attended = [
        scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=samples.causal and mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        for (q, k, v), mask in zip(parts, masks, strict=True)
    ]
    return torch.cat(attended, dim=2)
