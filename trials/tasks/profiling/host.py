"""Speed of copies between a device and the host's memory, which layers wait for that offload what they keep."""

import statistics

import torch

from trials.offload.transfers import Transfers
from trials.tasks.answer import ExchangeTiming
from trials.tasks.profiling.pace import begun_together

# Choices: about what a layer keeps of a pack, so that the start of a copy does not count.
_BYTES = 64 << 20
_COPIES = 9


def time_host(device: torch.device) -> tuple[ExchangeTiming, ...]:
    """Time copies to the host (in the forward pass) and back (in the backward pass) while all ranks copy.

    Nothing for a CPU, whose memory is the host's. Every rank must call it.
    """
    if device.type != "cuda":
        return ()
    there, here = torch.zeros(_BYTES, dtype=torch.uint8, device=device), Transfers(device).host_bytes(_BYTES)

    def seconds_per_byte(target: torch.Tensor, source: torch.Tensor) -> float:
        copy = begun_together(lambda: target.copy_(source, non_blocking=True), device)
        copy()
        return statistics.median(copy() for _ in range(_COPIES)) / _BYTES

    out, back = seconds_per_byte(here, there), seconds_per_byte(there, here)
    return (ExchangeTiming(name="copy", ranks=1, forward_seconds=out, backward_seconds=back),)
