"""Weights that data ranks hold in shares (ZeRO 3): the time of gathering a layer's, and of averaging gradients."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import distributed, nn

from trials.engine.gathering import gathered_together
from trials.layer_costs import LayerKind
from trials.model.stage import StageModule
from trials.tasks.answer import GatherTiming
from trials.tasks.profiling.links import now

_REPEATS = 10
_SCATTERED_BYTES = 8 << 20


def time_gathers(
    stage: StageModule, paths_by_kind: Mapping[LayerKind, Sequence[str]], device: torch.device
) -> Iterator[GatherTiming]:
    """Time each kind of layer, whose parts have these paths; all ranks gather at once. 0 s for a single rank."""
    (embedding,) = stage.model.get_input_embeddings().parameters()
    for kind, paths in paths_by_kind.items():
        groups = gathered_together(stage, paths)
        yield GatherTiming(
            layer=kind,
            seconds=_median_seconds(partial(_gather, groups), device),
            gathered_parameters=max((sum(weight.numel() for weight in group) for group in groups), default=0),
            # The input of the word embedding has no gradient, whose hook would free it.
            lingering_parameters=embedding.numel() if kind == "projector" and embedding.requires_grad else 0,
        )


def time_scatter(device: torch.device) -> float:
    """Return the seconds per byte of averaging gradients of which each rank keeps its share; 0 for a single rank."""
    ranks = distributed.get_world_size()
    share = torch.zeros(_SCATTERED_BYTES // 4 // ranks, device=device)
    gradients = torch.zeros(ranks * len(share), device=device)
    return _median_seconds(lambda: distributed.reduce_scatter_tensor(share, gradients), device) / gradients.nbytes


def _gather(groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Gather groups of weights of which each rank has a share, a message for each weight, as DeepSpeed does."""
    ranks = distributed.get_world_size()
    for group in groups:
        waiting = []
        for weight in group:
            share = -(-weight.numel() // ranks)
            part = weight.detach().flatten()[:share]
            whole = torch.empty(share * ranks, dtype=part.dtype, device=part.device)
            waiting.append(distributed.all_gather_into_tensor(whole, part, async_op=True))
        for handle in waiting:
            handle.wait()


def _median_seconds(run: Callable[[], object], device: torch.device) -> float:
    if distributed.get_world_size() == 1:
        return 0.0
    seconds = []
    for _ in range(_REPEATS + 1):
        distributed.barrier()
        start = now(device)
        run()
        seconds.append(now(device) - start)
    return statistics.median(seconds[1:])
