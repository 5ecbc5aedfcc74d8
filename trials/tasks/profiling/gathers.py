"""Weights that data ranks hold in shards (ZeRO 3): the time of gathering a layer's, and of averaging gradients."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import distributed, nn

from trials.costs.coefficients import LayerKind
from trials.engine.gathering import gathered_together
from trials.model.stage import StageModule
from trials.tasks.answer import ExchangeTiming
from trials.tasks.profiling.overlap import time_hidden_share
from trials.tasks.profiling.pace import LEAST_BYTES, Pace, begun_together, ladder, slope

# Choices: the weights of a layer take longer than a message, so fewer repeats do; of 8 MiB, latency is a small part.
_REPEATS = 10
_SCATTERED_BYTES = 8 << 20


def time_gathers(
    stage: StageModule, paths_by_kind: Mapping[LayerKind, Sequence[str]], device: torch.device, pace: Pace
) -> Iterator[ExchangeTiming]:
    """Time each kind of layer, whose parts have these paths; all ranks gather at once. 0 s for a single rank."""
    for kind, paths in paths_by_kind.items():
        groups = [each for path in paths for each in gathered_together(stage.model, path)]
        seconds = _gather_seconds(f"gathering of {kind} weights", groups, device, pace)
        yield ExchangeTiming(
            name="gather",
            ranks=distributed.get_world_size(),
            layer=kind,
            forward_seconds=seconds,
            # The weights of the head stay for the backward pass, which begins there. A layer that is recomputed is
            # gathered once for that and its backward pass.
            backward_seconds=0.0 if kind == "head" else seconds,
        )


def time_scatter(device: torch.device, repeats: int, pace: Pace) -> ExchangeTiming:
    """Time averages of gradients of which each rank keeps its shard; 0 s for a single rank.

    What a computation hides of them is timed with a gather beside them, as in a backward pass.
    """
    ranks = distributed.get_world_size()
    nothing = ExchangeTiming(name="scatter", ranks=ranks)
    if ranks == 1:
        return nothing

    def scatter(size: int) -> Callable[[], float]:
        share = torch.zeros(max(1, size // 4 // ranks), device=device)
        gradients = torch.zeros(ranks * len(share), device=device)
        return begun_together(lambda: distributed.reduce_scatter_tensor(share, gradients), device)

    def both(compute: Callable[[], object]) -> Callable[[], None]:
        share = torch.zeros(max(1, points[-1][0] // 4 // ranks), device=device)
        gradients, weights = (torch.zeros(ranks * len(share), device=device) for _ in range(2))

        def run() -> None:
            works = (
                distributed.all_gather_into_tensor(weights, share, async_op=True),
                distributed.reduce_scatter_tensor(torch.empty_like(share), gradients, async_op=True),
            )
            compute()
            for work in works:
                work.wait()

        return run

    points = pace.points(
        "averaging of gradients that are kept in shards",
        ladder(_SCATTERED_BYTES, LEAST_BYTES),
        scatter,
        _REPEATS,
        statistics.median,
    )
    return replace(
        nothing,
        backward_seconds=slope(((0, 0.0), *points)),
        hidden_share=time_hidden_share(both, device, repeats, pace),
    )


def _gather_seconds(what: str, groups: Sequence[Sequence[nn.Parameter]], device: torch.device, pace: Pace) -> float:
    full = sum(weight.nbytes for group in groups for weight in group)
    if distributed.get_world_size() == 1 or not full:
        return 0.0

    def gather(size: int) -> Callable[[], float]:
        return begun_together(partial(_gather, groups, size / full), device)

    points = pace.points(what, ladder(full, LEAST_BYTES), gather, _REPEATS, statistics.median)
    size, seconds = points[-1]
    return seconds + (full - size) * slope(((0, 0.0), *points))


def _gather(groups: Sequence[Sequence[nn.Parameter]], part_of_each: float) -> None:
    """Gather a part of each of the weights, of which each rank has a shard, a message for each, as DeepSpeed does."""
    ranks = distributed.get_world_size()
    for group in groups:
        waiting = []
        for weight in group:
            share = math.ceil(part_of_each * weight.numel() / ranks)
            part = weight.detach().flatten()[:share]
            whole = torch.empty(share * ranks, dtype=part.dtype, device=part.device)
            waiting.append(distributed.all_gather_into_tensor(whole, part, async_op=True))
        for handle in waiting:
            handle.wait()
