"""ZeRO 1 with torch alone: float32 weights and AdamW's moments in shards, one on each data rank."""

from collections.abc import Sequence

import torch
from deepspeed import comm
from torch import nn

from trials.engine.state import WEIGHT, OptimizerState
from trials.model.stage import StageModule

_ALIGNED = 64
"""Elements at whose multiples weights begin: 128 bytes of bfloat16, since kernels are faster at aligned addresses."""


class WeightShards:
    """This rank's shard of the float32 form of all weights, and the weights in their own type, which are one buffer.

    An optimizer updates the shard in their place, and the ranks gather the weights of all shards.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters of the optimizer by this rank's parts of them. They have float32 gradients."""
        updated = {each for group in optimizer.param_groups for each in group["params"]}
        assert updated == set(parameters), "the optimizer updates exactly these parameters"
        assert len({each.dtype for each in parameters}) == 1, "a buffer of weights has one type"
        ranks, rank = comm.get_world_size(), comm.get_rank()
        starts, end = list[int](), 0
        for parameter in parameters:
            starts.append(end)
            end += _aligned(parameter.numel())
        size = _aligned(-(-end // ranks))
        self._weights = torch.zeros(ranks * size, dtype=parameters[0].dtype, device=parameters[0].device)
        for parameter, start in zip(parameters, starts, strict=True):
            place = self._weights[start : start + parameter.numel()].view_as(parameter)
            parameter.data = place.copy_(parameter.detach())
        first = rank * size
        self._own = self._weights[first : first + size]
        self._shard = self._own.to(torch.float32, copy=True)
        self._optimizer = optimizer
        self._parts = dict[nn.Parameter, tuple[slice, torch.Tensor]]()
        """For each parameter in the shard, the range of its elements that the shard holds, and their values."""
        for parameter, start in zip(parameters, starts, strict=True):
            begin, end = max(start, first), min(start + parameter.numel(), first + size)
            if begin < end:
                assert parameter.grad is not None
                elements, part = slice(begin - start, end - start), self._shard[begin - first : end - first]
                part.grad = parameter.grad.view(-1)[elements]
                self._parts[parameter] = elements, part
        for group in optimizer.param_groups:
            group["params"] = [self._parts[each][1] for each in group["params"] if each in self._parts]

    @torch.no_grad()
    def update(self) -> None:
        """Update the weights by their gradients, of which each rank has all. Every rank must call it."""
        self._optimizer.step()
        self._own.copy_(self._shard)
        if len(self._own) < len(self._weights):
            comm.all_gather_into_tensor(self._weights, self._own)

    def read(self, parameter: nn.Parameter, part: str) -> torch.Tensor:
        """Return the whole `part` of the parameter, in its shape. Every rank must call it."""
        whole = torch.zeros(parameter.numel(), device=parameter.device)
        if parameter in self._parts:
            elements, held = self._held(parameter, part)
            whole[elements] = held
        comm.all_reduce(whole)
        return whole.view_as(parameter)

    def write(self, parameter: nn.Parameter, part: str, value: torch.Tensor) -> None:
        """Set the whole `part` of the parameter, of which this rank holds its own elements."""
        if part == WEIGHT:
            parameter.copy_(value)
        if parameter in self._parts:
            elements, held = self._held(parameter, part)
            held.copy_(value.flatten()[elements])

    def _held(self, parameter: nn.Parameter, part: str) -> tuple[slice, torch.Tensor]:
        elements, held = self._parts[parameter]
        return elements, held if part == WEIGHT else self._optimizer.state[held][part]


class ShardedState(OptimizerState):
    """The optimizer state where the ranks hold it in shards of the weights that train."""

    def __init__(self, shards: WeightShards, optimizer: torch.optim.Optimizer, stage: StageModule) -> None:
        super().__init__(shards, optimizer, stage)
        self._shards = shards

    def _read(self, parameter: nn.Parameter, part: str) -> torch.Tensor:
        return self._shards.read(parameter, part) if parameter.requires_grad else super()._read(parameter, part)

    def _write(self, parameter: nn.Parameter, part: str, value: torch.Tensor) -> None:
        self._shards.write(parameter, part, value)


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNED) * _ALIGNED
