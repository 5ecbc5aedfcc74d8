"""Attention whose scores are changed before their softmax, by a cap or by sinks, which no kernel of torch does."""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import dropout as dropped
from torch.utils.checkpoint import checkpoint

from trials.model.attention.samples import PackedSamples

_SCORES_BYTES = 256 << 20
"""Most bytes of the float32 scores that are live at once: enough to keep a GPU busy, and little of its memory."""


def by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    samples: PackedSamples,
    *,
    window: int | None,
    scaling: float | None,
    dropout: float,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return [1, heads, T, d] for the same as a `Kernel` takes.

    Scores s become cap * tanh(s / cap) (Gemma 2, arXiv 2408.00118, section 2). `sinks` [heads] are one more score of
    each head for every token, whose share of the attention goes nowhere (gpt-oss). Scores of some rows at a time are
    computed, and again in the backward pass, so that memory grows with T alone.
    """
    groups = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling

    def attended(
        rows: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        sinks: torch.Tensor | None,
        seen: torch.Tensor | int | None,
    ) -> torch.Tensor:
        """`seen` is a mask [rows, keys], the place of the first row where each sees what is before it, None for all."""
        if groups > 1:
            keys, values = (each.repeat_interleave(groups, dim=1) for each in (keys, values))
        scores = (rows @ keys.transpose(-1, -2)).float() * scale
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        if isinstance(seen, int):
            seen = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril(seen)
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            unseen = sinks.float()[None, :, None, None].expand(-1, -1, scores.shape[2], -1)
            scores = torch.cat([scores, unseen], dim=-1)
        shares = scores.softmax(dim=-1)[..., : keys.shape[2]].to(rows.dtype)
        return dropped(shares, dropout) @ values

    parts = zip(*(each.split(samples.lengths, dim=2) for each in (query, key, value)), strict=True)
    found = []
    for (rows, keys, values), mask in zip(parts, samples.masks(window, query.device), strict=True):
        most = max(1, _SCORES_BYTES // (4 * rows.shape[1] * rows.shape[2]))
        for start in range(0, rows.shape[2], most):
            causal = start if samples.causal else None
            seen = causal if mask is None else mask[start : start + most]
            some = rows[:, :, start : start + most]
            found.append(_computed_again(attended, dropout, some, keys, values, sinks, seen))
    return torch.cat(found, dim=2)


def _computed_again(run: Callable[..., torch.Tensor], dropout: float, *given: Any) -> torch.Tensor:
    """Return what a function returns, of which the backward pass is given what it was given alone."""
    # Reentrant, as layers are: what the recomputation saves passes the hooks that count live bytes.
    if torch.is_grad_enabled() and any(getattr(each, "requires_grad", False) for each in given):
        result: torch.Tensor = checkpoint(run, *given, use_reentrant=True, preserve_rng_state=dropout > 0)
        return result
    return run(*given)
