"""The attention that layers of transformers call for a pack."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from trials.model.attention.kernels import kernel_for
from trials.model.attention.samples import PackedSamples
from trials.model.attention.scores import by_scores
from trials.sharing.group import SharingGroup

PACKED_ATTENTION = "autotune_packed"
_CHOOSING = ("indices", "block_indices", "position_bias")
"""Options by which layers of transformers say which keys a token sees, or how much."""
_CAP = "softcap"
_SINKS = ("s_aux", "sinks")
_FOLLOWED = frozenset(("sliding_window", "position_ids", "is_causal", "output_attentions", "use_cache", _CAP, *_SINKS))
"""Options that are followed, that the samples of a pack answer, or that change no result."""
_UNSHARED = SharingGroup()


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    samples: PackedSamples | None = None,
    sharing: SharingGroup = _UNSHARED,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention of query [1, heads, T, d] to key and value [1, kv heads, T, d] inside each of `samples`.

    Where ranks share the pack, they hold T / degree of its tokens each, and compute the attention of heads / degree
    heads for all of them. Raise ValueError for a model that chooses the keys of each token itself, or whose layers have
    options that are not followed here.
    """
    if samples is None:
        raise ValueError(
            f"its {type(module).__name__} does not get the keywords of its model, so that it would not know where the "
            "samples of a pack end"
        )
    check_options(attention_mask, options)
    is_shared = sharing.share.degree > 1
    if is_shared:
        query, key, value = sharing.heads_of_pack(query, key, value)
    # EXAONE hands over None for its layers without a window, and names the window of the others in all of them.
    window = options["sliding_window"] if "sliding_window" in options else getattr(module, "sliding_window", None)
    cap, sinks = options.get(_CAP), next((options[name] for name in _SINKS if options.get(name) is not None), None)
    if cap is None and sinks is None:
        kernel = kernel_for(query, value, samples, dropout)
        attended = kernel(query, key, value, samples, window=window, scaling=scaling, dropout=dropout)
    else:
        if sinks is not None and is_shared:
            sinks = sinks.unflatten(0, (sharing.share.degree, -1))[sharing.share.index]
        attended = by_scores(
            query, key, value, samples, window=window, scaling=scaling, dropout=dropout, cap=cap, sinks=sinks
        )
    if is_shared:
        attended = sharing.tokens_of_rank(attended)
    return attended.transpose(1, 2).contiguous(), None


def check_options(attention_mask: torch.Tensor | None, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of the attention that is not followed, whatever its size."""
    given = [name for name, value in options.items() if value is not None and name not in _FOLLOWED]
    choosing = [name for name in _CHOOSING if name in given]
    if attention_mask is not None or choosing:
        raise ValueError(f"its layers choose which tokens are seen, by {', '.join(choosing) or 'a mask of their own'}")
    if given:
        raise ValueError(f"its attention has an option of which stages know nothing ({given[0]})")


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
