"""Language layers that ranks hold together: the time of what they exchange around a layer's blocks, for each degree."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import distributed

from trials.grid import Grid
from trials.model.refusals.tensor import possible_tensor_degrees
from trials.model.slices import layer_plan, matrices_of
from trials.model.stage import StageModule
from trials.sharing.group import SharingGroup, join_groups
from trials.tasks.answer import ExchangeTiming
from trials.tasks.profiling.pace import Pace
from trials.tasks.profiling.sharing import Shape, Tensors, exchange_seconds, passes, shapes_in_time
from trials.tasks.request import ProbeSizes

_BLOCKS = 2
"""Attention and MLP."""


def tensor_parallel_parameters(stage: StageModule) -> int:
    """Return how many parameters of a language layer tensor ranks hold in slices; 0 where it cannot be cut."""
    config, layer = stage.model.config, _layer(stage)
    if len(possible_tensor_degrees(config, [layer])) == 1:
        return 0
    dealt = [
        parameter
        for name, dimension in matrices_of(layer, layer_plan(config)).items()
        for parameter in layer.get_submodule(name).parameters()
        if dimension == 0 or parameter.ndim > 1  # the bias of what is added up is whole
    ]
    return sum(parameter.numel() for parameter in dealt)


def time_tensor(stage: StageModule, sizes: ProbeSizes, device: torch.device, pace: Pace) -> Iterator[ExchangeTiming]:
    """Time every degree that divides all ranks and by which layers can be cut. Every rank must take all of them.

    All ranks exchange at once. The first language layer of `stage` stands for all.
    """
    ranks = distributed.get_world_size()
    for degree in possible_tensor_degrees(stage.model.config, [_layer(stage)]):
        if degree == 1 or ranks % degree:
            continue
        group = join_groups(Grid(pipeline=1, data=ranks).sharing_ranks(degree), distributed.get_rank())
        what = f"exchanges of {degree} ranks that hold layers together"
        for shape in shapes_in_time(what, sizes.sample_shapes, partial(_exchanged, stage, group, device), pace):
            yield _timing(stage, group, device, shape, pace)
        distributed.destroy_process_group(group.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchanges:
    """What ranks of a group exchange around the blocks of a layer for a pack of `tokens`."""

    group: SharingGroup
    tokens: int
    parts: Tensors
    wholes: Tensors

    def gather(self) -> Tensors:
        return tuple(map(self.group.states_of_all, self.parts))

    def all(self) -> Tensors:
        return (*self.gather(), *map(self.group.summed_states, self.wholes))


def _exchanges(stage: StageModule, group: SharingGroup, device: torch.device, shape: Shape) -> _Exchanges:
    degree, hidden = group.share.degree, stage.model.config.get_text_config().hidden_size
    tokens = -(-math.prod(shape) // degree) * degree

    def states(count: int) -> Tensors:
        size = (1, count, hidden)
        return tuple(
            torch.zeros(size, device=device, dtype=stage.model.dtype, requires_grad=True) for _ in range(_BLOCKS)
        )

    return _Exchanges(group=group, tokens=tokens, parts=states(tokens // degree), wholes=states(tokens))


def _exchanged(
    stage: StageModule, group: SharingGroup, device: torch.device, shape: Shape
) -> Callable[[], tuple[float, float]]:
    found = _exchanges(stage, group, device, shape)
    return passes(found.all, (*found.parts, *found.wholes), device)


def _timing(stage: StageModule, group: SharingGroup, device: torch.device, shape: Shape, pace: Pace) -> ExchangeTiming:
    found = _exchanges(stage, group, device, shape)
    forward, backward = exchange_seconds(found.all, (*found.parts, *found.wholes), device, pace)
    # The backward pass of a block's first matrices gathers the states again.
    again, _ = exchange_seconds(found.gather, found.parts, device, pace)
    return ExchangeTiming(
        name="tensor",
        ranks=group.share.degree,
        layer="language",
        tokens=found.tokens,
        forward_seconds=forward,
        backward_seconds=backward + again,
        recompute_seconds=forward,
    )


def _layer(stage: StageModule) -> torch.nn.Module:
    return stage.model.get_submodule(stage.chain.language_layers[stage.cut.language[0]])
