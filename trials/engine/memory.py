"""Counts a rank's bytes, and ends the step when they pass the limit."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from trials.data.epoch import Floats
from trials.plan import Layout


class MemoryExceeded(Exception):
    """A rank needed more than its limit."""

    def __init__(self, needed_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"{needed_bytes} bytes needed, limit {limit_bytes}")
        self.needed_bytes = needed_bytes
        self.limit_bytes = limit_bytes


class MemoryMeter(Protocol):
    """Watches one rank's memory against a limit, in bytes."""

    def watch(self) -> AbstractContextManager[object]:
        """The context in which a step runs. Raises MemoryExceeded inside it when the limit is passed."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Most bytes at once since the meter was made, static bytes included."""
        ...


GRADIENT_BYTES = 4
"""Of a gradient, for each parameter: micro-batches are summed, and data ranks averaged, in float32."""


def static_bytes(parameters: int, element_bytes: int, layout: Layout) -> int:
    """Bytes of weights, gradients and AdamW's states for a stage with so many parameters."""
    return int(stages_static_bytes(np.array([parameters], dtype=np.float64), element_bytes, layout)[0])


def module_static_bytes(stage: nn.Module, layout: Layout) -> int:
    """The same for a stage's module, also after ZeRO 3 has taken its parameters away: it leaves their size."""
    parameters = list(stage.parameters())
    count = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters)
    return static_bytes(count, parameters[0].element_size(), layout)


def stages_static_bytes(parameters: Floats, element_bytes: int, layout: Layout) -> Floats:
    """The same of many stages at once, whole numbers, [stages]; exact below 2^53 bytes.

    ZeRO 0, for float32 weights alone, keeps two float32 moments of every parameter. ZeRO 1 splits them, and a float32
    copy of the weights, over the data-parallel ranks; ZeRO 2 splits the gradients too, ZeRO 3 also the weights (ZeRO
    paper, section 3).
    """
    share = parameters / layout.data
    states = 8 * parameters if layout.zero == 0 else 12 * share
    gradients = GRADIENT_BYTES * (share if layout.zero >= 2 else parameters)
    weights = element_bytes * (share if layout.zero == 3 else parameters)
    return np.rint(weights + gradients + states)


def memory_meter(device: torch.device, stage: nn.Module, layout: Layout, limit_bytes: int) -> MemoryMeter:
    """The meter for this kind of device. Raises MemoryExceeded when the static bytes alone pass the limit."""
    if device.type == "cuda":
        return CudaMeter(device, limit_bytes)
    return SavedTensorMeter(stage.parameters(), module_static_bytes(stage, layout), limit_bytes)


class SavedTensorMeter:
    """Stands for device memory on a CPU: static bytes plus the tensors that autograd keeps for the backward pass.

    Each storage counts once, parameters not at all (they are static). A layer that is recomputed counts with its input,
    and with everything it keeps while its backward pass runs.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], static_bytes: int, limit_bytes: int) -> None:
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._holders: dict[int, int] = {}
        self._live_bytes = 0
        self._limit_bytes = limit_bytes
        self._static_bytes = static_bytes
        self.peak_bytes = static_bytes
        self._check()

    def watch(self) -> AbstractContextManager[object]:
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> "torch.Tensor | _Held":
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self._parameters:
            return tensor
        return _Held(self, tensor, address, storage.nbytes())

    @staticmethod
    def _unpack(packed: "torch.Tensor | _Held") -> torch.Tensor:
        return packed.tensor if isinstance(packed, _Held) else packed

    @property
    def live_bytes(self) -> int:
        """Kept for the backward pass at this moment."""
        return self._live_bytes

    def hold(self, address: int, size: int) -> None:
        holders = self._holders.get(address, 0)
        self._holders[address] = holders + 1
        if holders == 0:
            self._live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._static_bytes + self._live_bytes)
            self._check()

    def release(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        if self._holders[address] == 0:
            del self._holders[address]
            self._live_bytes -= size

    def _check(self) -> None:
        if self._static_bytes + self._live_bytes > self._limit_bytes:
            raise MemoryExceeded(self._static_bytes + self._live_bytes, self._limit_bytes)


class _Held:
    """A tensor that autograd keeps; counted until autograd lets go of it."""

    __slots__ = ("_address", "_meter", "_size", "tensor")

    def __init__(self, meter: SavedTensorMeter, tensor: torch.Tensor, address: int, size: int) -> None:
        self.tensor = tensor
        self._meter, self._address, self._size = meter, address, size
        meter.hold(address, size)

    def __del__(self) -> None:
        self._meter.release(self._address, self._size)


class CudaMeter:
    """The allocator's own count on a GPU; the limit is the allocator's as well."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
        torch.cuda.reset_peak_memory_stats(device)
        self._device = device

    def watch(self) -> AbstractContextManager[object]:
        return nullcontext()

    @property
    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))
