"""Speed between ranks: of messages to a neighbour, and of averaging gradients over all."""

import statistics
import time

import torch
from deepspeed import comm

_LARGE_BYTES = 4 << 20
_SMALL_BYTES = 1 << 10
_MESSAGES = 3
"""DeepSpeed sends the shapes of a pack's tensors, its states, and its ids (`PipelineEngine._exec_send_activations`)."""
_REDUCED_BYTES = 8 << 20
_EXCHANGES = 20
"""More than layers are repeated: messages are short, and anything else that runs on the machine makes them late."""


def time_link(device: torch.device) -> tuple[float, float]:
    """Return (seconds before the first byte of a pack's states, seconds per byte) to the next rank; (0, 0) on the last.

    Every rank must call it. One pair is timed after the other, there and back, since clocks of two ranks differ.
    """
    found = (0.0, 0.0)
    for first in range(comm.get_world_size() - 1):
        comm.barrier()
        # The other ranks wait at the barrier, so that their messages do not share the link.
        if comm.get_rank() in (first, first + 1):
            small, large = (_one_way(size, first, device) for size in (_SMALL_BYTES, _LARGE_BYTES))
            if comm.get_rank() == first:
                found = (small, max(0.0, large - small) / (_LARGE_BYTES - _SMALL_BYTES))
    comm.barrier()
    return found


def _one_way(size: int, first: int, device: torch.device) -> float:
    """Return the least seconds of a pack's messages, the last one of `size` bytes, from rank `first` to the next."""
    messages = [torch.zeros(_SMALL_BYTES // 4, device=device) for _ in range(_MESSAGES - 1)]
    messages.append(torch.zeros(size // 4, device=device))
    is_first = comm.get_rank() == first
    other = first + 1 if is_first else first
    turns = (comm.send, comm.recv) if is_first else (comm.recv, comm.send)
    seconds = []
    for _ in range(_EXCHANGES + 1):
        start = _now(device)
        for transfer in turns:
            for message in messages:
                transfer(message, other)
        seconds.append((_now(device) - start) / 2)
    return min(seconds[1:])


def time_reduction(device: torch.device, repeats: int) -> float:
    """Return the seconds per byte of averaging gradients over all ranks; 0 for one rank. Every rank must call it."""
    if comm.get_world_size() == 1:
        return 0.0
    gradients = torch.zeros(_REDUCED_BYTES // 4, device=device)
    seconds = []
    for _ in range(repeats + 1):
        comm.barrier()
        start = _now(device)
        comm.all_reduce(gradients)
        seconds.append(_now(device) - start)
    return statistics.median(seconds[1:]) / _REDUCED_BYTES


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
