"""Copies of packs to the device, while it computes with the packs before."""

from collections.abc import Callable
from typing import TypeAlias

import torch

from trials.model.ends.head_loss import Targets

States: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Inputs: TypeAlias = tuple[States, Targets]
"""(inputs, labels) of a pack, as DeepSpeed takes them."""


class CopyStream:
    """Copies of the next pack on a CUDA stream of its own. On a CPU nothing is copied.

    At most two packs have copies on the device: the host waits until the device has begun the pack before. It still
    runs ahead by one pack.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._begun: torch.cuda.Event | None = None

    def copied(self, copy: Callable[[], Inputs]) -> Inputs:
        """Return what `copy` returns, which copies from page-locked memory without waiting."""
        if self._stream is None:
            return copy()
        if self._begun is not None:
            self._begun.synchronize()
        with torch.cuda.stream(self._stream):
            inputs = copy()
        computing = torch.cuda.current_stream(self._device)
        computing.wait_stream(self._stream)
        for tensor in (*inputs[0], *inputs[1]):
            if tensor.device.type == "cuda":
                # Otherwise its memory would be given to the next copy while the device still reads it.
                tensor.record_stream(computing)
        self._begun = torch.cuda.Event()
        self._begun.record(computing)
        return inputs
