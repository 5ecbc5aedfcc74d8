"""Speed between ranks, in every layout: of messages to the next stage, and of averaging gradients over data ranks."""

import statistics
import time
from collections.abc import Iterator

import torch
from torch import distributed

from trials.grid import Grid
from trials.tasks.answer import CommunicationTiming

_LARGE_BYTES = 4 << 20
_SMALL_BYTES = 1 << 10
_MESSAGES = 3
"""DeepSpeed sends the shapes of a pack's tensors, its states, and its ids (`PipelineEngine._exec_send_activations`)."""
_REDUCED_BYTES = 8 << 20
_EXCHANGES = 20
"""More than layers are repeated: messages are short, and anything else that runs on the machine makes them late."""


def time_communication(device: torch.device, repeats: int) -> Iterator[CommunicationTiming]:
    """Time every pipeline x data of all ranks, from one stage on. Every rank must take all of them.

    All ranks of a layout communicate at once, as in a training, where they share the links between machines.
    """
    ranks = distributed.get_world_size()
    for pipeline in range(1, ranks + 1):
        if ranks % pipeline == 0:
            grid = Grid(pipeline=pipeline, data=ranks // pipeline)
            latency, per_byte = _time_links(grid, device)
            yield CommunicationTiming(
                pipeline=grid.pipeline,
                data=grid.data,
                latency_seconds=latency,
                seconds_per_byte=per_byte,
                reduce_seconds_per_byte=_time_reduction(grid, device, repeats),
            )


def _time_links(grid: Grid, device: torch.device) -> tuple[float, float]:
    """Return (seconds before the first byte of a pack's states, seconds per byte) to the next stage; 0 on the last.

    Every second stage exchanges messages with the next one, there and back, since clocks of two ranks differ; then the
    others do.
    """
    rank = distributed.get_rank()
    stage = grid.coordinates(rank).stage
    found = (0.0, 0.0)
    for turn in range(min(2, grid.pipeline - 1)):
        distributed.barrier()
        is_first = stage % 2 == turn
        other = rank + grid.data if is_first else rank - grid.data
        if 0 <= other < grid.world_size:
            small, large = (_one_way(size, other, device, is_first=is_first) for size in (_SMALL_BYTES, _LARGE_BYTES))
            if is_first:
                found = (small, max(0.0, large - small) / (_LARGE_BYTES - _SMALL_BYTES))
    distributed.barrier()
    return found


def _one_way(size: int, other: int, device: torch.device, *, is_first: bool) -> float:
    """Return the least seconds of a pack's messages, the last one of `size` bytes, between this rank and another."""
    messages = [torch.zeros(_SMALL_BYTES // 4, device=device) for _ in range(_MESSAGES - 1)]
    messages.append(torch.zeros(size // 4, device=device))
    turns = (distributed.send, distributed.recv) if is_first else (distributed.recv, distributed.send)
    seconds = []
    for _ in range(_EXCHANGES + 1):
        start = now(device)
        for transfer in turns:
            for message in messages:
                transfer(message, other)
        seconds.append((now(device) - start) / 2)
    return min(seconds[1:])


def _time_reduction(grid: Grid, device: torch.device, repeats: int) -> float:
    """Return the seconds per byte of averaging gradients over the data ranks of the stage; 0 for one data rank."""
    if grid.data == 1:
        return 0.0
    own = grid.coordinates(distributed.get_rank()).stage
    # Every rank must create every group, in the same order.
    groups = [distributed.new_group(list(grid.stage_ranks(stage))) for stage in range(grid.pipeline)]
    gradients = torch.zeros(_REDUCED_BYTES // 4, device=device)
    seconds = []
    for _ in range(repeats + 1):
        distributed.barrier()
        start = now(device)
        distributed.all_reduce(gradients, group=groups[own])
        seconds.append(now(device) - start)
    distributed.barrier()
    distributed.destroy_process_group(groups[own])
    return statistics.median(seconds[1:]) / _REDUCED_BYTES


def now(device: torch.device) -> float:
    """Return the time at which the device has finished its work, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
