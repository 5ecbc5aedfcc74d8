"""The ranks that compute a pack together, and what they exchange."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import distributed as dist

from trials.errors import DataError
from trials.sharing.share import ALONE, Share


class _Exchange(torch.autograd.Function):
    """All-to-all of blocks of rows: those of sizes `give` go to the ranks of a group in order, `take` come back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, give: list[int], take: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.back = take, give, group
        received = rows.new_empty(sum(take), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), take, give, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        # The reverse exchange: each rank gives what it took.
        return _exchanged(gradients[0], *ctx.back), None, None, None


def _exchanged(rows: torch.Tensor, give: list[int], take: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    received: torch.Tensor = _Exchange.apply(rows, give, take, group)  # type: ignore[no-untyped-call]
    return received


class _Join(torch.autograd.Function):
    """All-gather of equal parts along the first dimension. Each rank uses the whole, so its gradient is a sum."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        whole = part.new_empty(dist.get_world_size(group) * part.shape[0], *part.shape[1:])
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Sum.apply(gradients[0], ctx.group), None  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """Reduce-scatter along the first dimension: the reverse of `_Join`."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        part = whole.new_empty(whole.shape[0] // dist.get_world_size(group), *whole.shape[1:])
        dist.reduce_scatter_tensor(part, whole.contiguous(), group=group)
        return part

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Join.apply(gradients[0], ctx.group), None  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingGroup:
    """One rank's view of the ranks that share packs with it. All of them must call each exchange, in the same order."""

    share: Share = ALONE
    group: dist.ProcessGroup | None = None
    """None where the rank has its packs for itself."""

    def heads_of_pack(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return heads / degree heads of all tokens [1, heads / degree, T, d] for this rank's tokens [1, heads, t, d].

        Heads go to the ranks in order. Of a tensor with fewer heads than ranks each head goes to several of them. The
        tensors may have different d and travel as one message (DeepSpeed-Ulysses, arXiv 2309.14509, section 3).
        """
        degree = self.share.degree
        # Grouped-query attention has fewer heads of keys: ranks with queries of one group get a copy each.
        whole = [each.repeat_interleave(max(1, degree // each.shape[1]), dim=1) for each in tensors]
        parts = [each.reshape(degree, -1, *each.shape[2:]) for each in whole]
        # Joined, since one message has the latency of one.
        received = self._exchange_evenly(torch.cat([part.flatten(1) for part in parts], dim=1))
        columns = received.split([part[0].numel() for part in parts], dim=1)
        # [ranks, heads, t, d]: the tokens of a head come from the ranks in order.
        blocks = [column.view(part.shape).transpose(0, 1) for column, part in zip(columns, parts, strict=True)]
        return tuple(block.flatten(1, 2).unsqueeze(0) for block in blocks)

    def tokens_of_rank(self, states: torch.Tensor) -> torch.Tensor:
        """Return all heads of this rank's tokens [1, heads, t, d] for some heads of all [1, heads / degree, T, d]."""
        _, heads, tokens, size = states.shape
        degree = self.share.degree
        parts = states.view(heads, degree, tokens // degree, size).transpose(0, 1)
        received = self._exchange_evenly(parts.flatten(1))
        return received.view(1, degree * heads, tokens // degree, size)

    def features_of_tokens(
        self, features: Iterable[torch.Tensor], wanted: torch.Tensor, checksum: int
    ) -> list[torch.Tensor]:
        """Return the rows that this rank's tokens take, for `features` [rows, hidden] that each rank has computed.

        Ranks hold rows in the order of the pack. `wanted` [T], on the CPU, says which tokens of the pack take one, in
        this order. The host waits until the ranks know how many rows each of them has. Raise DataError unless they have
        the same `checksum` of the pack.
        """
        held = list(features)
        # `all_to_all_single` takes its sizes from the host, which has to wait for the device.
        owns = self._alike(len(held[0]), checksum, held[0].device)
        wants = wanted.view(self.share.degree, -1).sum(dim=1).tolist()
        give, take = _overlaps(owns, wants, self.share.index), _overlaps(wants, owns, self.share.index)
        return [_exchanged(each[: sum(give)], give, take, self._joined) for each in held]

    def check_alike(self, checksum: int, device: torch.device) -> None:
        """Raise DataError unless all ranks have the same `checksum` of a pack; without other ranks do nothing."""
        if self.group is not None:
            self._alike(0, checksum, device)

    def states_of_all(self, states: torch.Tensor) -> torch.Tensor:
        """Return the states of all tokens [1, T, hidden]; `states` [1, t, hidden] are of this rank's tokens."""
        joined: torch.Tensor = _Join.apply(states[0], self._joined)  # type: ignore[no-untyped-call]
        return joined.unsqueeze(0)

    def summed_states(self, states: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of `states` [1, T, hidden], for this rank's tokens alone [1, t, hidden]."""
        summed: torch.Tensor = _Sum.apply(states[0], self._joined)  # type: ignore[no-untyped-call]
        return summed.unsqueeze(0)

    def slice_of(self, whole: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return this rank's of equal slices along a dimension, as a copy."""
        return whole.chunk(self.share.degree, dimension)[self.share.index].clone()

    def joined_slices(self, part: torch.Tensor, dimension: int) -> torch.Tensor:
        """Return the tensor of which each rank holds one of equal slices along a dimension. It has no gradient."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.share.degree)]
        dist.all_gather(parts, part.contiguous(), group=self._joined)
        return torch.cat(parts, dimension)

    def _exchange_evenly(self, rows: torch.Tensor) -> torch.Tensor:
        ones = [1] * self.share.degree
        return _exchanged(rows, ones, ones, self._joined)

    def _alike(self, value: int, checksum: int, device: torch.device) -> list[int]:
        """Return the `value` of each rank. Raise DataError unless they have the same `checksum` of their pack."""
        own = torch.tensor([value, checksum], device=device)
        of_ranks = own.new_empty(2 * self.share.degree)
        dist.all_gather_into_tensor(of_ranks, own, group=self.group)
        values, checksums = of_ranks.view(-1, 2).T.tolist()
        if len(set(checksums)) > 1:
            raise DataError(
                "ranks that share a pack have read different samples of it, since one of them lacks files that another "
                "has; restore the files that the logs of the ranks name on each node, and run the same command again"
            )
        found: list[int] = values
        return found

    @property
    def _joined(self) -> dist.ProcessGroup:
        assert self.group is not None, "a rank that shares no pack exchanges nothing"
        return self.group


def _overlaps(mine: Sequence[int], others: Sequence[int], index: int) -> list[int]:
    """Return how many rows of part `index` of a row of parts lie in each part of another division of the same rows."""
    start, end = sum(mine[:index]), sum(mine[: index + 1])
    ends = list(accumulate(others))
    return [max(0, min(end, last) - max(start, last - size)) for last, size in zip(ends, others, strict=True)]


def join_groups(blocks: Iterable[range], rank: int) -> SharingGroup:
    """Create the group of each block of ranks, and return that of `rank`. Every rank must call it."""
    found = SharingGroup()
    for ranks in blocks:
        # torch wants every rank to create every group, in the same order, its own or not.
        group = dist.new_group([*ranks]) if len(ranks) > 1 else None
        if group is not None and rank in ranks:
            found = SharingGroup(share=Share(index=ranks.index(rank), degree=len(ranks)), group=group)
    return found
