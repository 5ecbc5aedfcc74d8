"""Averages of gradients while a rank computes: the least bucket that costs little, and how much of them is hidden."""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import distributed

from trials.tasks.profiling.layer_passes import middle_probes, run_layers, saved_share
from trials.tasks.profiling.one_of_each import OneOfEach
from trials.tasks.profiling.pace import Pace, begun_together, ladder, slowest
from trials.tasks.profiling.probes import Probe
from trials.tasks.request import ProbeSizes

_ALL_BYTES = 8 << 20
"""Gradients that are averaged in buckets of each size."""
# A choice: from `LEAST_BYTES` of pace.py on, the time of an exchange depends on its size.
_LEAST_BYTES = 64 << 10
_GROWTH = 2
"""Place in the ladder of one bucket that is timed to the next: each has four times the bytes."""
# A choice: smaller buckets begin earlier in the backward pass, which is worth a little of their own time.
_COSTS_LITTLE = 1.05
"""Time of averaging in small buckets, as a multiple of the least time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Averages in buckets on this rank, over all ranks."""

    bucket_bytes: int
    """Least bucket with which both take hardly more time than with the best one; the same on all ranks."""
    hidden_share: float
    """Share of the shorter of both that averages and a computation save by running at once."""


NO_OVERLAP = Overlap(bucket_bytes=0, hidden_share=0.0)


def time_overlap(stage: OneOfEach, sizes: ProbeSizes, device: torch.device, repeats: int, pace: Pace) -> Overlap:
    """Time averages over all ranks in buckets of several sizes, then during passes of layers that take as long.

    Every rank must call it. Backward passes begin such averages one after the other, and wait for all of them.
    """
    of_buckets = ladder(_ALL_BYTES, _LEAST_BYTES)
    averages = partial(_Averages, device=device)
    *_, most = pace.sizes(
        "averaging of gradients during computation",
        of_buckets,
        lambda size: begun_together(averages(size, size).run, device),
    )

    def seconds(run: Callable[[], object]) -> float:
        return statistics.median(pace.repeat(begun_together(run, device), repeats))

    layers = [*middle_probes(stage, sizes, device)]
    averaging, passing = slowest(device, [seconds(averages(most, most).run), seconds(_Passes(layers, 1).run)])
    passes = _Passes(layers, max(1, round(averaging / passing)))
    averages = partial(averages, most, times=max(1, round(passing / averaging)))
    # During passes, since a message takes time from them as well.
    candidates = [size for size in of_buckets[::_GROWTH] if size <= most]
    times = slowest(device, [seconds(partial(passes.run, averages(size))) for size in candidates])
    bucket = next(size for size, each in zip(candidates, times, strict=True) if each <= _COSTS_LITTLE * min(times))
    chosen = averages(bucket)
    hidden = saved_share(chosen.run, passes.run, partial(passes.run, chosen), device, pace)
    return Overlap(bucket_bytes=bucket, hidden_share=max(0.0, hidden))


class _Averages:
    """Averages of `size` bytes of gradients in buckets, several times."""

    def __init__(self, size: int, bucket: int, *, device: torch.device, times: int = 1) -> None:
        self._buckets = torch.zeros(size // 4, device=device).split(bucket // 4) * times
        self._works: list[distributed.Work] = []

    def begin(self, share: float) -> None:
        """Begin what is left to begin of this share of all averages."""
        for bucket in self._buckets[len(self._works) : round(share * len(self._buckets))]:
            work = distributed.all_reduce(bucket, async_op=True)
            assert work is not None  # only a rank outside of the group has none
            self._works.append(work)

    def run(self) -> None:
        """Begin what is left, and wait for all."""
        self.begin(1.0)
        for work in self._works:
            work.wait()
        self._works = []


class _Passes:
    """Forward and backward passes of a layer of each tower, several times."""

    def __init__(self, layers: Sequence[Probe], times: int) -> None:
        self._layers = [*layers] * times

    def run(self, averages: _Averages | None = None) -> None:
        """Run the passes while averages begin, if any: one after the other, evenly spread."""
        turns = itertools.count(1)

        def begin() -> None:
            if averages:
                averages.begin(next(turns) / (2 * len(self._layers)))

        for layer in self._layers:
            run_layers(layer, 1, begin, begin)
        if averages:
            averages.run()
