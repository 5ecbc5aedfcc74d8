"""The head and the loss, of the rows of a pack with a label alone."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from trials.data.records.sample import IGNORED

_LOGITS_BYTES = 256 << 20
"""Most bytes of the float32 logits that are live at once: some hundred rows of the largest vocabularies, enough to
keep a GPU busy, and a small part of its memory."""


class Targets(NamedTuple):
    """The rows of a pack that have a label. A tuple, as DeepSpeed passes labels."""

    rows: torch.Tensor
    """[N], in the pack"""
    labels: torch.Tensor
    """[N]"""
    scales: torch.Tensor
    """[N], or [] for one that holds for all: what the loss of each row is multiplied by."""


def targets_of(labels: torch.Tensor, scales: torch.Tensor) -> Targets:
    """Return the targets of labels [T], with scales [T] or []. On the CPU, where counting rows waits for no device."""
    rows = (labels != IGNORED).nonzero().squeeze(1)
    return Targets(rows=rows, labels=labels[rows], scales=scales[rows] if scales.dim() else scales)


def chunk_targets(vocabulary: int) -> int:
    """Return the most targets whose logits are live at once."""
    return max(1, _LOGITS_BYTES // (4 * vocabulary))


def summed_loss(
    head: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor, targets: Targets, vocabulary: int
) -> torch.Tensor:
    """Return the cross-entropy [] of language states [T, hidden] with their targets, summed over these with scales.

    `head` returns logits [rows, vocabulary] of some rows. Where those of all targets would take more memory than
    `_LOGITS_BYTES`, they are computed in chunks, and again in the backward pass.
    """

    def loss(rows: torch.Tensor, labels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return (cross_entropy(head(rows).float(), labels, reduction="none") * scales).sum()

    rows = states.index_select(0, targets.rows)
    most = chunk_targets(vocabulary)
    if len(rows) <= most:
        return loss(rows, targets.labels, targets.scales)
    if torch.is_grad_enabled() and not rows.requires_grad:
        rows.requires_grad_()  # a reentrant checkpoint has gradients only if its input needs one
    scales = targets.scales.expand(len(rows))
    parts = zip(*(each.split(most) for each in (rows, targets.labels, scales)), strict=True)
    # Reentrant, as layers are: what the recomputation saves passes the hooks that count live bytes.
    return torch.stack([checkpoint(loss, *part, use_reentrant=True) for part in parts]).sum()
