"""Averages of gradients while a rank computes: the least bucket that costs little, and how much of them is hidden."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import distributed

from trials.tasks.profiling.pace import Pace, begun_together, ladder, slowest

_ALL_BYTES = 8 << 20
"""Gradients that are averaged in buckets of each size."""
# A choice: from `LEAST_BYTES` of pace.py on, the time of an exchange depends on its size.
_LEAST_BYTES = 64 << 10
_GROWTH = 2
"""Place in the ladder of one bucket that is timed to the next: each has four times the bytes."""
# A choice: smaller buckets begin earlier in the backward pass, which is worth a little of their own time.
_COSTS_LITTLE = 1.05
"""Time of averaging in small buckets, as a multiple of the least time."""
# A choice: a product of some milliseconds on a CPU core, so that their number can be fitted to the averages.
_WIDTH = 512
"""Rows and columns of the matrices that are multiplied meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Averages in buckets on this rank, over all ranks."""

    bucket_bytes: int
    """Least bucket with which both take hardly more time than with the best one; the same on all ranks."""
    hidden_share: float
    """Share of the shorter of both that averages and a computation save by running at once."""


NO_OVERLAP = Overlap(bucket_bytes=0, hidden_share=0.0)


def time_overlap(device: torch.device, repeats: int, pace: Pace) -> Overlap:
    """Time averages over all ranks in buckets of several sizes, then while matrices are multiplied.

    Every rank must call it. Backward passes begin such averages one after the other, and wait for all of them.
    """
    sizes = ladder(_ALL_BYTES, _LEAST_BYTES)
    *_, most = pace.sizes(
        "averaging of gradients during computation",
        sizes,
        lambda size: begun_together(_averages(size, size, device), device),
    )

    compute = _as_long_as(_averages(most, most, device), device, repeats, pace)
    # Meanwhile, since a message takes time from the computation as well.
    candidates = [size for size in sizes[::_GROWTH] if size <= most]
    times = [_seconds(_averages(most, size, device, compute), device, repeats, pace) for size in candidates]
    times = [*slowest(device, times)]
    bucket = next(size for size, each in zip(candidates, times, strict=True) if each <= _COSTS_LITTLE * min(times))
    runs = _averages(most, bucket, device), compute, _averages(most, bucket, device, compute)
    share = partial(saved_share, *(begun_together(run, device) for run in runs))
    hidden = min(1.0, max(0.0, statistics.median(pace.repeat(share, repeats))))
    return Overlap(bucket_bytes=bucket, hidden_share=hidden)


def _nothing() -> None:
    """Compute nothing."""


def _seconds(run: Callable[[], object], device: torch.device, repeats: int, pace: Pace) -> float:
    return statistics.median(pace.repeat(begun_together(run, device), repeats))


def _as_long_as(exchange: Callable[[], object], device: torch.device, repeats: int, pace: Pace) -> Callable[[], object]:
    """Return products of matrices that take as long as the exchange, so that either can hide all of the other."""
    matrices = torch.ones(_WIDTH, _WIDTH, device=device)
    runs = exchange, lambda: torch.mm(matrices, matrices)
    exchanging, product = slowest(device, [_seconds(run, device, repeats, pace) for run in runs])
    count = max(1, round(exchanging / product))

    def compute() -> None:
        for _ in range(count):
            torch.mm(matrices, matrices)

    return compute


def saved_share(alone: Callable[[], float], computing: Callable[[], float], both: Callable[[], float]) -> float:
    """Return the share of the shorter of both that an exchange and a computation save by running at once.

    Each function runs one of them, or both, and returns its seconds. They take turns, so that a drift of the machine
    affects all alike. The share is negative where both together take longer than one after the other.
    """
    shorter, longer = sorted((alone(), computing()))
    return (shorter + longer - both()) / shorter


def _averages(
    size: int, bucket: int, device: torch.device, compute: Callable[[], object] = _nothing
) -> Callable[[], None]:
    """Return the averages of `size` bytes of gradients in buckets, which run while `compute` does."""
    buckets = torch.zeros(size // 4, device=device).split(bucket // 4)

    def run() -> None:
        works = [distributed.all_reduce(each, async_op=True) for each in buckets]
        compute()
        for work in works:
            assert work is not None  # only a rank outside of the group has none
            work.wait()

    return run
