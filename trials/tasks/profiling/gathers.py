"""Weights that data ranks hold in shards (ZeRO 3): the time of gathering a layer's, and of averaging gradients."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import distributed, nn

from trials.engine.gathering import gathered_together
from trials.tasks.answer import ExchangeTiming
from trials.tasks.profiling.one_of_each import OneOfEach
from trials.tasks.profiling.overlap import time_hidden_share
from trials.tasks.profiling.pace import LEAST_BYTES, Pace, begun_together, ladder, slope

# A choice: the weights of a layer take longer than a message, so fewer repeats do.
_REPEATS = 10


def time_gathers(stage: OneOfEach, device: torch.device, pace: Pace) -> Iterator[ExchangeTiming]:
    """Time each kind of layer; all ranks gather at once. 0 s for a single rank."""
    for kind, paths in stage.paths_by_kind.items():
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


def time_scatter(size: int, device: torch.device, repeats: int, pace: Pace) -> ExchangeTiming:
    """Time averages of gradients of which each rank keeps its shard; 0 s for a single rank.

    Layers have `size` bytes of gradients, in one message each, which is begun with zeros and added to those of the
    packs before. What a computation hides of them is timed with a gather beside them, as in a backward pass.
    """
    ranks = distributed.get_world_size()
    nothing = ExchangeTiming(name="scatter", ranks=ranks)
    if ranks == 1:
        return nothing

    def scatter(size: int) -> Callable[[], float]:
        share = torch.zeros(max(1, size // 4 // ranks), device=device)

        def run() -> None:
            gradients, received = torch.zeros(ranks * len(share), device=device), torch.empty_like(share)
            distributed.reduce_scatter_tensor(received, gradients)
            share.add_(received)

        return begun_together(run, device)

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
        ladder(size, LEAST_BYTES),
        scatter,
        _REPEATS,
        statistics.median,
    )
    return replace(
        nothing,
        backward_seconds=_seconds_of(size, points) / size,
        hidden_share=time_hidden_share(both, device, repeats, pace),
    )


def _gather_seconds(what: str, groups: Sequence[Sequence[nn.Parameter]], device: torch.device, pace: Pace) -> float:
    full = sum(weight.nbytes for group in groups for weight in group)
    if distributed.get_world_size() == 1 or not full:
        return 0.0

    def gather(size: int) -> Callable[[], float]:
        return begun_together(partial(_gather, groups, size / full), device)

    points = pace.points(what, ladder(full, LEAST_BYTES), gather, _REPEATS, statistics.median)
    return _seconds_of(full, points)


def _seconds_of(full: int, points: Sequence[tuple[int, float]]) -> float:
    """Return the seconds of a message, of which perhaps only smaller ones were timed."""
    size, seconds = points[-1]
    return seconds + (full - size) * slope(((0, 0.0), *points))


def _gather(groups: Sequence[Sequence[nn.Parameter]], part_of_each: float) -> None:
    """Gather a part of each group of weights, of which each rank has a shard, in one message, as `GatheredWeights`."""
    ranks = distributed.get_world_size()
    for group in groups:
        share = math.ceil(part_of_each * sum(weight.numel() for weight in group) / ranks)
        part = group[0].new_zeros(share)
        distributed.all_gather_into_tensor(part.new_empty(share * ranks), part)
