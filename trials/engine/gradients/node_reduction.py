"""Averages of gradients in two steps: over neighbouring data ranks, which one node has, and then between nodes.

In a ring of all ranks of N nodes, the link of a node carries 2 (n - 1) / n times the bytes of the gradients, for n
ranks. With a reduce-scatter on each node, sums of each share between the nodes, and a gather on each node, it carries
2 (N - 1) / N times as many (Patarasuk and Yuan 2009, section 3, for each of the steps).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import distributed

from trials.grid import Grid

# A choice: 32 MiB of float32, long enough for full bandwidth.
_SHARE = 8 << 20
"""Most elements of a share: the parts that a rank receives take room besides the gradients."""


class NodeReduction:
    """One rank's part in the averages of gradients."""

    def __init__(self, grid: Grid, within: int) -> None:
        """Create the groups of all ranks: `within` data ranks each average first. Every rank must call it."""
        self._data, self._within = grid.data, within
        rank = distributed.get_rank()
        self._inside = _group_of(grid.attending_ranks(within), rank)
        self._between = _group_of(grid.equal_ranks(within), rank)

    def add_up(self, gradients: torch.Tensor) -> None:
        """Replace gradients [n], contiguous, by their sum over the data ranks of the stage."""
        even = len(gradients) // self._within * self._within
        for whole in gradients[:even].split(_SHARE * self._within) if even else ():
            # An all-to-all and a sum, since the reduce-scatter of gloo sends as much as an all-reduce.
            parts = torch.empty_like(whole)
            distributed.all_to_all_single(parts, whole, group=self._inside)
            share = parts.view(self._within, -1).sum(dim=0)
            distributed.all_reduce(share, group=self._between)
            distributed.all_gather_into_tensor(whole, share, group=self._inside)
        if len(rest := gradients[even:]):
            distributed.all_reduce(rest, group=self._inside)
            distributed.all_reduce(rest, group=self._between)

    def take_over(self, engine: Any) -> None:
        """Let DeepSpeed's engine, and its optimizer for ZeRO 1, average gradients in this way."""
        engine.allreduce_bucket = self._averaged
        if hasattr(engine.optimizer, "params_in_partition"):
            engine.optimizer.allreduce_bucket = self._added_up

    def close(self) -> None:
        """Leave the groups."""
        for group in (self._inside, self._between):
            distributed.destroy_process_group(group)

    def _averaged(self, bucket: Sequence[torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
        """Return the averages of a bucket's tensors, flat, as `DeepSpeedEngine.allreduce_bucket` does."""
        joined = _joined(bucket)
        self.add_up(joined)
        return joined.div_(self._data)

    def _added_up(self, bucket: Sequence[torch.Tensor], *_: Any, divide: bool = True, **__: Any) -> torch.Tensor:
        """Return sums, or averages to `divide`, as `DeepSpeedZeroOptimizer.allreduce_bucket` does."""
        if divide:
            return self._averaged(bucket)
        joined = _joined(bucket)
        self.add_up(joined)
        return joined


def _joined(bucket: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.flatten() for each in bucket]).float()


def _group_of(blocks: Iterable[range], rank: int) -> distributed.ProcessGroup:
    """Create the group of each block of ranks, and return that of `rank`. Every rank must call it."""
    found: distributed.ProcessGroup | None = None
    for ranks in blocks:
        group = distributed.new_group([*ranks])
        found = group if rank in ranks else found
    assert found is not None, "every rank is in a block"
    return found
