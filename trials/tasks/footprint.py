"""What a rank process holds between requests, by which a leak is seen before it hurts a measurement."""

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

_DESCRIPTORS_PER_RANK = 20
"""By how many the file descriptors of a process may grow, for each rank of its group.

Measured on two CPU ranks: the first pipeline plan after one of data parallelism leaves 18 more descriptors and 12 more
threads, once, whatever follows. Each plan of ZeRO 3 leaves 10 and 6, so the fifth at the latest ends its ranks.
"""
_THREADS = 30
"""By how many threads a process may grow."""
_DEVICE_BYTES = 256 << 20
"""By how much a process may grow on its accelerator, which the next plan would lack: workspaces of libraries do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Resources of one process at one moment."""

    descriptors: int
    """Open file descriptors."""
    threads: int
    resident_bytes: int
    """Told, not judged: the allocator keeps what it was given, and plans differ."""
    device_bytes: int = 0
    """Of tensors on the accelerator; 0 on a CPU."""


def footprint() -> Footprint:
    """Of this process, which is a rank."""
    import torch  # noqa: PLC0415  # the agent, which compares footprints, does without

    process = psutil.Process()
    return Footprint(
        descriptors=process.num_fds(),
        threads=process.num_threads(),
        resident_bytes=process.memory_info().rss,
        device_bytes=torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
    )


def leaks(first: Sequence[Footprint], now: Sequence[Footprint]) -> dict[int, tuple[Footprint, Footprint]]:
    """(before, now) of each rank that has grown beyond the allowance; both sequences are in order of rank."""
    descriptors = _DESCRIPTORS_PER_RANK * len(now)
    return {
        rank: (before, after)
        for rank, (before, after) in enumerate(zip(first, now, strict=True))
        if after.descriptors - before.descriptors > descriptors
        or after.threads - before.threads > _THREADS
        or after.device_bytes - before.device_bytes > _DEVICE_BYTES
    }
