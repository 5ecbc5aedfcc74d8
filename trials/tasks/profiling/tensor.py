"""Language layers that ranks hold together: the time of what they exchange around a layer's blocks, for each degree."""

from collections.abc import Iterator

import torch
from torch import distributed

from trials.grid import Grid
from trials.model.refusals.tensor import possible_tensor_degrees
from trials.model.slices import layer_plan, matrices_of
from trials.model.stage import StageModule
from trials.sharing.group import SharingGroup, join_groups
from trials.tasks.answer import TensorTiming
from trials.tasks.profiling.sharing import exchange_seconds
from trials.tasks.request import ProbeSizes

_BLOCKS = 2
"""Attention and MLP."""


def dealt_parameters(stage: StageModule) -> int:
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


def time_tensor(stage: StageModule, sizes: ProbeSizes, device: torch.device) -> Iterator[TensorTiming]:
    """Time every degree that divides all ranks and by which layers can be cut. Every rank must take all of them.

    All ranks exchange at once. `stage` holds one layer of each kind.
    """
    ranks = distributed.get_world_size()
    for degree in possible_tensor_degrees(stage.model.config, [_layer(stage)]):
        if degree == 1 or ranks % degree:
            continue
        group = join_groups(Grid(pipeline=1, data=ranks).sharing_ranks(degree), distributed.get_rank())
        for samples, length in sizes.sample_shapes:
            divisible = -(-samples * length // degree) * degree
            yield _timing(stage, group, divisible, device)
        distributed.destroy_process_group(group.group)


def _timing(stage: StageModule, group: SharingGroup, tokens: int, device: torch.device) -> TensorTiming:
    hidden, dtype = stage.model.config.get_text_config().hidden_size, stage.model.dtype

    def states(count: int) -> tuple[torch.Tensor, ...]:
        shape = (1, count, hidden)
        return tuple(torch.zeros(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(_BLOCKS))

    parts, wholes = states(tokens // group.share.degree), states(tokens)

    def gather() -> tuple[torch.Tensor, ...]:
        return tuple(map(group.states_of_all, parts))

    def both() -> tuple[torch.Tensor, ...]:
        return (*gather(), *map(group.summed_states, wholes))

    forward, backward = exchange_seconds(both, (*parts, *wholes), device)
    # The backward pass of a block's first matrices gathers the states again.
    again, _ = exchange_seconds(gather, parts, device)
    return TensorTiming(
        degree=group.share.degree, tokens=tokens, forward_seconds=forward, backward_seconds=backward + again
    )


def _layer(stage: StageModule) -> torch.nn.Module:
    return stage.model.get_submodule(stage.chain.language_layers[stage.cut.language.start])
