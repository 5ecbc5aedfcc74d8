"""Resources that a rank process holds between requests, compared to find leaks before they affect measurements."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

_DESCRIPTORS_PER_RANK = 20
"""Allowed growth of a process's file descriptors, for each rank of its group.

Measured on two CPU ranks: the first pipeline plan after one of data parallelism leaves 18 more descriptors and 12 more
threads, once, whatever follows. Each plan of ZeRO 3 leaves 10 and 6, so the fifth at the latest ends its ranks.
"""
# By the same measurement: 12 threads once, and 6 for each of three plans of ZeRO 3.
_THREADS = 30
"""Allowed growth of a process's threads."""
# A choice: cuBLAS alone keeps a workspace of 32 MiB on an H100 for each handle and stream.
_DEVICE_BYTES = 256 << 20
"""Allowed growth on the accelerator, for workspaces of libraries; memory held beyond that the next plan would lack."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Resources of one process at one moment."""

    descriptors: int
    """Open file descriptors."""
    threads: int
    resident_bytes: int
    """Resident memory. It is only reported: the allocator keeps freed memory, and plans differ."""
    device_bytes: int = 0
    """Bytes of tensors on the accelerator; 0 on a CPU."""


def footprint() -> Footprint:
    """Return the footprint of this process, which is a rank."""
    process = psutil.Process()
    torch = sys.modules.get("torch")  # not imported for this: then there are no tensors
    return Footprint(
        descriptors=process.num_fds(),
        threads=process.num_threads(),
        resident_bytes=process.memory_info().rss,
        device_bytes=torch.cuda.memory_allocated() if torch and torch.cuda.is_available() else 0,
    )


def leaks(first: Sequence[Footprint], now: Sequence[Footprint]) -> dict[int, tuple[Footprint, Footprint]]:
    """Return (before, now) of each rank that has grown beyond the allowance; both sequences are in order of rank."""
    descriptors = _DESCRIPTORS_PER_RANK * len(now)
    return {
        rank: (before, after)
        for rank, (before, after) in enumerate(zip(first, now, strict=True))
        if after.descriptors - before.descriptors > descriptors
        or after.threads - before.threads > _THREADS
        or after.device_bytes - before.device_bytes > _DEVICE_BYTES
    }
