"""Weights that data ranks hold in shards (ZeRO 3): the time of gathering a layer's, and of averaging gradients.

Also by how much both prolong the passes during which they run.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import distributed, nn

from trials.engine.gathering import gathered_together
from trials.tasks.answer import ExchangeTiming
from trials.tasks.profiling.layer_passes import middle_probes, run_layers, saved_share
from trials.tasks.profiling.one_of_each import OneOfEach
from trials.tasks.profiling.pace import LEAST_BYTES, Pace, begun_together, ladder, slope
from trials.tasks.request import ProbeSizes

# A choice: the weights of a layer take longer than a message, so fewer repeats do.
_REPEATS = 10
_LAYERS = 4
"""Layers of a tower in a row; a choice: most of them have one before and one behind."""


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


def time_scatter(size: int, device: torch.device, pace: Pace) -> ExchangeTiming:
    """Time averages of gradients of which each rank keeps its shard; 0 s for a single rank.

    Layers have `size` bytes of gradients, in one message each, which is begun with zeros and added to those of the
    packs before.
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

    points = pace.points(
        "averaging of gradients that are kept in shards",
        ladder(size, LEAST_BYTES),
        scatter,
        _REPEATS,
        statistics.median,
    )
    return replace(nothing, backward_seconds=_seconds_of(size, points) / size)


def time_added_share(stage: OneOfEach, sizes: ProbeSizes, expected: float, device: torch.device, pace: Pace) -> float:
    """Return `Exchange.added_share`, from forward and backward passes of several layers of each tower.

    They run with a pack of middle size, with and without the messages of ZeRO 3. It is 1 for a single rank, and on
    links over which these messages, `expected` seconds for a layer, take too long. Every rank must call it.
    """
    towers = [
        (probe, _LayerMessages(stage.parameters_by_kind[probe.layer], device))
        for probe in middle_probes(stage, sizes, device)
    ]
    what = "exchanges during passes"
    if distributed.get_world_size() == 1 or not pace.repeats(what, len(towers) * _LAYERS * expected, 1):
        return 1.0

    def messages() -> None:
        for _, sent in towers:
            for send in (*[sent.gather] * _LAYERS, *[sent.exchange] * _LAYERS, sent.wait):
                send()

    def passes() -> None:
        for probe, _ in towers:
            run_layers(probe, _LAYERS)

    def both() -> None:
        for probe, sent in towers:
            run_layers(probe, _LAYERS, sent.gather, sent.exchange)
            sent.wait()

    return 1.0 - saved_share(messages, passes, both, device, pace)


class _LayerMessages:
    """Messages of a layer's weights and gradients, sent while other layers are computed, as `Gathering` sends them."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        trained = sum(each.numel() for each in parameters if each.requires_grad)
        self._ranks, shard = distributed.get_world_size(), self._shard
        self._own = parameters[0].new_zeros(shard(sum(each.numel() for each in parameters)))
        self._whole = self._own.new_empty(self._ranks * len(self._own))
        self._sums, self._received = torch.zeros(2, shard(trained), device=device)
        self._works: list[distributed.Work] = []

    def _shard(self, elements: int) -> int:
        return math.ceil(elements / self._ranks)

    def gather(self) -> None:
        """Begin to gather weights, when the messages before are there."""
        self.wait()
        self._works = [distributed.all_gather_into_tensor(self._whole, self._own, async_op=True)]

    def exchange(self) -> None:
        """Begin to gather weights, and to scatter gradients."""
        self.gather()
        self._sums.add_(self._received)
        gradients = self._sums.new_zeros(self._ranks * len(self._sums))
        self._works.append(distributed.reduce_scatter_tensor(self._received, gradients, async_op=True))

    def wait(self) -> None:
        """Wait until the messages are there."""
        for work in self._works:
            work.wait()
        self._works = []


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
