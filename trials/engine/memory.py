"""Memory of a rank: static bytes of its module, and meters that raise when a step exceeds the limit."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from trials.engine.allocator import AllocatorPeaks, usable_bytes
from trials.engine.gathering import GatheredWeights
from trials.engine.static_memory import static_bytes
from trials.plan import Layout
from trials.recomputation.saving import SavingHooks, saving

_log = logging.getLogger(__name__)


class MemoryExceeded(Exception):
    """A rank needed more memory than its limit."""

    def __init__(self, needed_bytes: int, memory_limit_bytes: int) -> None:
        super().__init__(f"{needed_bytes} bytes needed, limit {memory_limit_bytes}")
        self.needed_bytes = needed_bytes
        self.memory_limit_bytes = memory_limit_bytes


class MemoryMeter(Protocol):
    """Comparison of the memory of one rank with a limit, in bytes."""

    def watch(self) -> AbstractContextManager[object]:
        """Return the context in which a step runs. Raise MemoryExceeded inside it when the limit is exceeded."""
        ...

    @property
    def peak_bytes(self) -> int:
        """Peak bytes since the meter was created, static bytes included."""
        ...


def module_static_bytes(stage: nn.Module, layout: Layout) -> int:
    """Return the static bytes of a stage's module."""
    parameters = list(stage.parameters())
    # ZeRO 3 leaves empty parameters on each rank; `ds_numel` is their whole size.
    sizes = [getattr(parameter, "ds_numel", parameter.numel()) for parameter in parameters]
    frozen = sum(size for size, parameter in zip(sizes, parameters, strict=True) if not parameter.requires_grad)
    return static_bytes(sum(sizes), parameters[0].element_size(), layout, frozen=frozen)


def memory_meter(device: torch.device, stage: nn.Module, layout: Layout, memory_limit_bytes: int) -> MemoryMeter:
    """Return the meter for this kind of device. Raise MemoryExceeded when the static bytes alone exceed the limit."""
    if device.type == "cuda":
        return CudaMeter(device, memory_limit_bytes)
    parameters = list(stage.parameters())
    return SavedTensorMeter(
        parameters, module_static_bytes(stage, layout), memory_limit_bytes, gathers=layout.shards_weights
    )


class SavedTensorMeter:
    """Model of device memory on a CPU: static bytes plus the tensors that autograd saves for the backward pass.

    Each storage counts once. Parameters are static, so they do not count again. A recomputed layer counts with its
    input, and during its backward pass with everything that it saves. With ZeRO 3 the weights count that are gathered.
    """

    live_bytes: int
    """Bytes at this moment of the tensors that are saved for the backward pass, and of gathered weights."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        static_bytes: int,
        memory_limit_bytes: int,
        *,
        gathers: bool = False,
    ) -> None:
        """`gathers` says whether the parameters are those of an engine with ZeRO 3."""
        self._parameters = {parameter.untyped_storage()._cdata for parameter in parameters}
        self._gathered = GatheredWeights(parameters, self.hold, self.release) if gathers else None
        self._holders: dict[int, int] = {}
        self.live_bytes = 0
        self._memory_limit_bytes = memory_limit_bytes
        self._static_bytes, self._most = static_bytes, 0
        self._room = memory_limit_bytes - static_bytes
        if self._room < 0:
            raise MemoryExceeded(static_bytes, memory_limit_bytes)

    def watch(self) -> AbstractContextManager[object]:
        return saving(SavingHooks(self._pack, _unpack))

    # What follows is called for some hundred tensors of each pack: calls between these functions would take 1 % of a
    # training's time.

    def _pack(self, tensor: torch.Tensor) -> "torch.Tensor | _SavedTensor":
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._parameters:
            return tensor
        if self._gathered and (weight := self._gathered.whole(tensor)) is not None:
            return weight  # as without hooks: it is gathered again before its backward pass
        held = _SavedTensor(self, tensor, address, storage.nbytes())
        self.hold(address, held.size)  # where this raises, `held` ends and releases it
        return held

    def hold(self, address: int, size: int) -> None:
        holders = self._holders
        if address in holders:
            holders[address] += 1
            return
        holders[address] = 1
        self.live_bytes += size
        self._most = max(self._most, self.live_bytes)
        if self.live_bytes > self._room:
            raise MemoryExceeded(self._static_bytes + self.live_bytes, self._memory_limit_bytes)

    def release(self, address: int, size: int) -> None:
        holders = self._holders
        left = holders[address] - 1
        if left:
            holders[address] = left
        else:
            del holders[address]
            self.live_bytes -= size

    @property
    def peak_bytes(self) -> int:
        return self._static_bytes + self._most


class _SavedTensor:
    """A tensor that autograd saves; counted until autograd releases it."""

    __slots__ = ("_address", "_meter", "size", "tensor")

    def __init__(self, meter: SavedTensorMeter, tensor: torch.Tensor, address: int, size: int) -> None:
        self.tensor, self._meter, self._address, self.size = tensor, meter, address, size

    def __del__(self) -> None:
        self._meter.release(self._address, self.size)


def _unpack(packed: "torch.Tensor | _SavedTensor") -> torch.Tensor:
    return packed.tensor if isinstance(packed, _SavedTensor) else packed


class CudaMeter:
    """Meter that reads the statistics of the CUDA allocator, which enforces the limit itself."""

    limit_bytes: int
    """Most that the allocator takes from the device: less than the limit where others leave less."""

    def __init__(self, device: torch.device, memory_limit_bytes: int) -> None:
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
        self.limit_bytes = usable_bytes(memory_limit_bytes, total=total, free=free, reserved=reserved)
        if self.limit_bytes < memory_limit_bytes:
            _log.warning(
                "the device has %d bytes left for this rank, less than its limit of %d: other processes or contexts "
                "hold the rest",
                self.limit_bytes,
                memory_limit_bytes,
            )
        torch.cuda.set_per_process_memory_fraction(self.limit_bytes / total, device)
        torch.cuda.reset_peak_memory_stats(device)
        # Retries are counted over the life of the process.
        self._retries = AllocatorPeaks.of(torch.cuda.memory_stats(device)).retries
        self._device = device

    def watch(self) -> AbstractContextManager[object]:
        return nullcontext()

    @property
    def peak_bytes(self) -> int:
        peaks = AllocatorPeaks.of(torch.cuda.memory_stats(self._device))
        return replace(peaks, retries=peaks.retries - self._retries).peak_bytes
