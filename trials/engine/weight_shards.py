"""Weights and AdamW's moments in shards, one on each data rank."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import distributed, nn

from trials.engine.state import WEIGHT, OptimizerState
from trials.model.stage import StageModule

_ALIGNED = 64
"""Elements at whose multiples weights begin: 128 bytes of bfloat16, since kernels are faster at aligned addresses."""


class Held(NamedTuple):
    """What a rank's shard holds of a parameter."""

    elements: slice
    """The range of the parameter's elements."""
    within: slice
    """Their place in the shard."""
    values: torch.Tensor
    """Their values in the shard, which the optimizer updates."""


class WeightShards:
    """The weights of some parameters in one buffer, of which this rank has a shard, in float32 where they train."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make the parameters, which have one type and all train or are all frozen, views of a buffer."""
        assert len({(each.dtype, each.requires_grad) for each in parameters}) == 1, "a buffer of weights has one type"
        ranks, rank = distributed.get_world_size(), distributed.get_rank()
        self.places, end = dict[nn.Parameter, slice](), 0
        """The place of each parameter in the buffer."""
        for parameter in parameters:
            self.places[parameter] = slice(end, end + parameter.numel())
            end += _aligned(parameter.numel())
        size = _aligned(-(-end // ranks))
        self.whole = torch.zeros(ranks * size, dtype=parameters[0].dtype, device=parameters[0].device)
        """The weights in their own type, [ranks x shard]; the parameters are views of it."""
        for parameter, place in self.places.items():
            parameter.data = self.whole[place].view_as(parameter).copy_(parameter.detach())
        self.trains = parameters[0].requires_grad
        self.own = self.whole[rank * size : (rank + 1) * size]
        """This rank's part of the weights, [shard]."""
        self.shard = self.own
        """The same, in float32 where they train."""
        self.held = dict[nn.Parameter, Held]()
        """What the shard has of each parameter."""

    def begin_updates(self) -> None:
        """Create the shard that an optimizer updates, with its part of the float32 gradients that parameters have."""
        self.shard = self.own.to(torch.float32, copy=True) if self.trains else self.own
        self.held = {each: held for each in self.places if (held := self._held(each))}
        for parameter, held in self.held.items():
            if parameter.grad is not None:
                held.values.grad = parameter.grad.view(-1)[held.elements]

    def _held(self, parameter: nn.Parameter) -> Held | None:
        place, first = self.places[parameter], distributed.get_rank() * len(self.shard)
        begin, end = max(place.start, first), min(place.stop, first + len(self.shard))
        if begin >= end:
            return None
        within = slice(begin - first, end - first)
        return Held(slice(begin - place.start, end - place.start), within, self.shard[within])

    @torch.no_grad()
    def gather_update(self) -> None:
        """Take over this rank's weights from the shard, and gather those of all ranks, each of which must call it."""
        self.own.copy_(self.shard)
        if len(self.own) < len(self.whole):
            distributed.all_gather_into_tensor(self.whole, self.own)

    def working(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the whole weight in its own type. Every rank must call it."""
        return parameter.detach()

    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        """Set the whole weight, of which this rank holds its own elements."""
        parameter.copy_(value)
        if held := self.held.get(parameter):
            held.values.copy_(value.flatten()[held.elements])


def update_shards(optimizer: torch.optim.Optimizer, shards: Iterable[WeightShards]) -> None:
    """Let the optimizer update this rank's parts of the parameters."""
    for of_shard in shards:
        of_shard.begin_updates()
    parts = {each: part for of_shard in shards for each, part in of_shard.held.items()}
    for group in optimizer.param_groups:
        group["params"] = [parts[each].values for each in group["params"] if each in parts]


class ShardedState(OptimizerState):
    """The optimizer state where the ranks hold it in shards."""

    def __init__(self, shards: Iterable[WeightShards], optimizer: torch.optim.Optimizer, stage: StageModule) -> None:
        super().__init__(optimizer, optimizer, stage)
        self._shards = {parameter: each for each in shards for parameter in each.places}

    def working(self, parameter: nn.Parameter) -> torch.Tensor:
        return self._shards[parameter].working(parameter) if parameter in self._shards else super().working(parameter)

    def _read(self, parameter: nn.Parameter, part: str) -> torch.Tensor:
        if parameter not in self._shards:
            return super()._read(parameter, part)
        whole = torch.zeros(parameter.numel(), device=parameter.device)
        if held := self._shards[parameter].held.get(parameter):
            whole[held.elements] = held.values if part == WEIGHT else self._optimizer.state[held.values][part]
        distributed.all_reduce(whole)
        return whole.view_as(parameter)

    def _write(self, parameter: nn.Parameter, part: str, value: torch.Tensor) -> None:
        shards = self._shards[parameter]
        if part == WEIGHT:
            shards.write(parameter, value)
        elif held := shards.held.get(parameter):
            self._optimizer.state[held.values][part].copy_(value.flatten()[held.elements])


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNED) * _ALIGNED
