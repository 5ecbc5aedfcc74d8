"""Attention inside each sample of a pack, and none between samples."""

from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from trials.sharing.group import SharingGroup

PACKED_ATTENTION = "autotune_packed"
_CHOOSING = ("indices", "block_indices", "position_bias")
"""Options by which layers of transformers say which keys a token sees, or how much."""
_UNSHARED = SharingGroup()


class SampleMasks:
    """What each token of a pack may attend to in its sample; made once for a pack, for each window."""

    def __init__(self, lengths: tuple[int, ...], blocks: torch.Tensor | None = None, *, causal: bool = True) -> None:
        """`lengths` are those of the samples. Tokens of one of `blocks` see each other, too, inside the window.

        `blocks` [T] holds the number of a token's block, or -1 for a token that only sees what is before it. Where
        attention is not `causal`, tokens see all of their sample.
        """
        self.lengths = lengths
        self.causal = causal
        self._blocks = blocks
        self._masks: dict[int | None, list[torch.Tensor | None]] = {}

    def of(self, window: int | None, device: torch.device) -> list[torch.Tensor | None]:
        """Return a mask [length, length] for each sample, True where a token may look; None where it needs none."""
        if not self.causal:
            return [None] * len(self.lengths)
        if window not in self._masks:
            blocks = self._blocks.split(self.lengths) if self._blocks is not None else [None] * len(self.lengths)
            self._masks[window] = [
                _mask(length, window, block, device) for length, block in zip(self.lengths, blocks, strict=True)
            ]
        return self._masks[window]


def _mask(length: int, window: int | None, blocks: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    in_blocks = blocks is not None and bool((blocks >= 0).any())
    if not in_blocks and (window is None or length <= window):
        return None
    place = torch.arange(length, device=device)
    visible = place[:, None] >= place
    if blocks is not None:
        visible |= (blocks[:, None] == blocks) & (blocks >= 0)
    if window is not None:
        visible &= place > place[:, None] - window
    return visible


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    samples: SampleMasks,
    sharing: SharingGroup = _UNSHARED,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of query [1, heads, T, d] to key and value [1, kv heads, T, d] inside each of `samples`.

    One call per sample: the work is the sum of the squared lengths, not the square of their sum. Where ranks share the
    pack, they hold T / degree of its tokens each, and compute the attention of heads / degree heads for all of them.
    Raise ValueError for a model that chooses the keys of each token itself.
    """
    choosing = [name for name in _CHOOSING if options.get(name) is not None]
    if attention_mask is not None or choosing:
        raise ValueError(f"its layers choose which tokens are seen, by {', '.join(choosing) or 'a mask of their own'}")
    is_shared = sharing.share.degree > 1
    if is_shared:
        query, key, value = sharing.heads_of_pack(query, key, value)
    # EXAONE hands over None for its layers without a window, and names the window of the others in all of them.
    window = options["sliding_window"] if "sliding_window" in options else getattr(module, "sliding_window", None)
    masks = samples.of(window, query.device)
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and any(mask is not None for mask in masks):
        # With a mask, grouped heads are left to the kernel that holds all scores in memory (torch 2.13).
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    parts = zip(*(tensor.split(samples.lengths, dim=2) for tensor in (query, key, value)), strict=True)
    blocks = [
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
    attended = torch.cat(blocks, dim=2)
    if is_shared:
        attended = sharing.tokens_of_rank(attended)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
