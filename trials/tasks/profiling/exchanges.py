"""Timing of all that ranks exchange, and of updates, in rounds that are spread over a profile."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TypeVar

import torch

from trials.engine.static_memory import GRADIENT_BYTES
from trials.stage import TOWERS
from trials.tasks.answer import CommunicationTiming, ExchangeTiming, UpdateTiming
from trials.tasks.profiling.gathers import time_added_share, time_gathers, time_scatter
from trials.tasks.profiling.links import layouts_of_all, time_averages, time_host, time_messages
from trials.tasks.profiling.one_of_each import OneOfEach, one_of_each
from trials.tasks.profiling.overlap import NO_OVERLAP, time_overlap
from trials.tasks.profiling.pace import Pace, Slowest
from trials.tasks.profiling.probes import Probe, ProbeBytes
from trials.tasks.profiling.sharing import time_sharing
from trials.tasks.profiling.tensor import time_tensor
from trials.tasks.profiling.updates import ExchangeRates, time_updates
from trials.tasks.request import Profile, Request

Timing = TypeVar("Timing", CommunicationTiming, ExchangeTiming, UpdateTiming)


# A choice: a disturbance seldom covers two of three rounds, and each further round prolongs the profile.
_ROUNDS = 3
"""An odd number, so that a median is that of one round."""
_ALL_ROUNDS = 1 / 3
"""Most time for all rounds, as a share of the time for exchanges: a longer round outlasts a disturbance by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """Fields of a `ProfileReport`."""

    communications: tuple[CommunicationTiming, ...]
    exchanges: tuple[ExchangeTiming, ...]
    updates: tuple[UpdateTiming, ...]
    shortened: tuple[tuple[str, float], ...]


class ExchangeRounds:
    """Rounds of timings, of which the medians count: one disturbance may last for all repeats of a round.

    Every rank must make every call, in the same order.
    """

    def __init__(self, time_all: Callable[[], Exchanges], seconds: float, slowest: Slowest) -> None:
        """`time_all` takes a round, in at most these seconds. Where that takes long, it is the only one."""
        self._time_all, self._seconds, self._slowest = time_all, seconds, slowest
        self._rounds: list[Exchanges] = []
        self._has_time = True

    def add(self) -> None:
        """Take a round, if there is time for it."""
        if not self._has_time:
            return
        self._slowest([0.0])  # ranks meet: their waiting for one that comes late is not time of the round
        began = time.perf_counter()
        self._rounds.append(self._time_all())
        if len(self._rounds) == 1:
            (seconds,) = self._slowest([time.perf_counter() - began])
            self._has_time = _ROUNDS * seconds <= _ALL_ROUNDS * self._seconds

    def medians(self) -> Exchanges:
        """Return the median of each measurement in the rounds; over slow links, the first round."""
        rounds = _of_same_sizes(self._rounds)
        return Exchanges(
            communications=tuple(map(_median_link, zip(*(each.communications for each in rounds), strict=True))),
            exchanges=tuple(map(_median, zip(*(each.exchanges for each in rounds), strict=True))),
            updates=tuple(map(_median, zip(*(each.updates for each in rounds), strict=True))),
            shortened=rounds[0].shortened,
        )


def time_exchanges(
    request: Request,
    task: Profile,
    stage: OneOfEach,
    device: torch.device,
    *,
    seconds: float,
    bytes_of: Callable[[Probe], ProbeBytes],
) -> Exchanges:
    """Time all of them once, in these seconds. `bytes_of` measures the bytes of a layer."""
    pace = Pace.of(seconds, device)
    communications, averages = list[CommunicationTiming](), list[ExchangeTiming]()
    for grid in layouts_of_all():
        overlap = NO_OVERLAP
        if grid.data == grid.world_size > 1:
            overlap = time_overlap(stage, task.sizes, device, task.repeats, pace)
        communications.append(time_messages(grid, overlap, device, pace))
        averages += time_averages(grid, task.of_node, device, task.repeats, pace)
    sharing = tuple(time_sharing(stage, task.sizes, device, bytes_of, pace))
    tensor = tuple(time_tensor(stage, task.sizes, device, pace))
    gathers = tuple(time_gathers(stage, device, pace))
    size = _gradient_bytes(stage)
    scatter = time_scatter(size, device, pace)
    gathered = max(each.forward_seconds for each in gathers if each.layer in TOWERS)
    of_layer = size * scatter.backward_seconds + 2 * gathered
    scatter = replace(scatter, added_share=time_added_share(stage, task.sizes, of_layer, device, pace))
    parameters = sum(each.numel() for of_kind in stage.parameters_by_kind.values() for each in of_kind)
    rates = ExchangeRates(
        reduction=averages[0].backward_seconds if averages else 0.0,  # the first layout has all ranks in data parallel
        gathering=sum(timing.forward_seconds for timing in gathers) / parameters,
    )
    build = partial(one_of_each, request.job.model, request.job.training, device, only_usual=True)
    return Exchanges(
        communications=tuple(communications),
        exchanges=(*averages, *sharing, *tensor, *gathers, scatter, *time_host(device)),
        updates=time_updates(request, task, build, rates, pace),
        shortened=tuple(pace.shortened.items()),
    )


def _gradient_bytes(stage: OneOfEach) -> int:
    """Return the bytes of gradients of a layer that trains, the mean of both towers."""
    trained = {
        kind: sum(each.numel() for each in of_kind if each.requires_grad)
        for kind, of_kind in stage.parameters_by_kind.items()
    }
    of_towers = [trained[tower] for tower in TOWERS if trained.get(tower)]
    return GRADIENT_BYTES * round(statistics.mean(of_towers or [max(trained.values())]))


def _of_same_sizes(rounds: Sequence[Exchanges]) -> list[Exchanges]:
    """Return the rounds that timed exchanges at the same sizes: most of them, or those that shortened least.

    A disturbance may make a round shorten some.
    """
    numbers = Counter(each.shortened for each in rounds)
    usual = max(numbers, key=lambda shortened: (numbers[shortened], sum(share - 1 for _, share in shortened)))
    return [each for each in rounds if each.shortened == usual]


def _median_link(same: Sequence[CommunicationTiming]) -> CommunicationTiming:
    """Return the timing with medians. Each round has chosen a bucket: the shares of the median one count."""
    bucket = statistics.median_low(each.bucket_bytes for each in same)
    share = statistics.median(each.hidden_share for each in same if each.bucket_bytes == bucket)
    return replace(_median(same), bucket_bytes=bucket, hidden_share=share)


def _median(same: Sequence[Timing]) -> Timing:
    """Return the timing with the median of each measurement."""
    measured = [field.name for field in fields(same[0]) if isinstance(getattr(same[0], field.name), float)]
    return replace(same[0], **{name: statistics.median(getattr(each, name) for each in same) for name in measured})
