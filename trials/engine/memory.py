"""Memory of a rank: static bytes of its module, and meters that raise when a step exceeds the limit."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from trials.engine.allocator import AllocatorPeaks, usable_bytes
from trials.engine.static_memory import static_bytes
from trials.model.stage import StageModule
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
    frozen = sum(each.numel() for each in parameters if not each.requires_grad)
    count = sum(each.numel() for each in parameters)
    return static_bytes(count, parameters[0].element_size(), layout, frozen=frozen)


def memory_meter(device: torch.device, stage: StageModule, layout: Layout, memory_limit_bytes: int) -> MemoryMeter:
    """Return the meter for this kind of device. Raise MemoryExceeded when the static bytes alone exceed the limit."""
    if device.type == "cuda":
        return CudaMeter(device, memory_limit_bytes)
    static = module_static_bytes(stage.model, layout)
    meter = SavedTensorMeter(list(stage.model.parameters()), static, memory_limit_bytes)
    for shards in stage.shards:
        shards.count = meter.count
    return meter


class NoMeter:
    """Counts nothing, for a step that no limit of the job bounds."""

    peak_bytes = 0

    def watch(self) -> AbstractContextManager[object]:
        return nullcontext()


class SavedTensorMeter:
    """Model of device memory on a CPU: static bytes plus the tensors that autograd saves for the backward pass.

    Each storage counts once. Parameters are static, so they do not count again. A recomputed layer counts with its
    input, and during its backward pass with everything that it saves. Weights and gradients count that are whole on a
    rank for a moment, of which it holds a shard.
    """

    live_bytes: int
    """Bytes at this moment of the tensors that are saved for the backward pass, and of what `count` adds."""

    def __init__(self, parameters: Sequence[torch.Tensor], static_bytes: int, memory_limit_bytes: int) -> None:
        # Storages by their identity: those of weights in shards have no address at the moment.
        self._parameters = {parameter.untyped_storage()._cdata for parameter in parameters}
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
        identity = storage._cdata
        if identity in self._parameters:
            return tensor
        held = _SavedTensor(self, tensor, identity, storage.nbytes())
        self._hold(identity, held.size)  # where this raises, `held` ends and releases it
        return held

    def _hold(self, identity: int, size: int) -> None:
        holders = self._holders
        if identity in holders:
            holders[identity] += 1
            return
        holders[identity] = 1
        self.count(size)

    def count(self, size: int) -> None:
        """Count further bytes, or fewer where `size` is negative."""
        self.live_bytes += size
        self._most = max(self._most, self.live_bytes)
        if self.live_bytes > self._room:
            raise MemoryExceeded(self._static_bytes + self.live_bytes, self._memory_limit_bytes)

    def release(self, identity: int, size: int) -> None:
        holders = self._holders
        left = holders[identity] - 1
        if left:
            holders[identity] = left
        else:
            del holders[identity]
            self.live_bytes -= size

    @property
    def peak_bytes(self) -> int:
        return self._static_bytes + self._most


class _SavedTensor:
    """A tensor that autograd saves; counted until autograd releases it."""

    __slots__ = ("_identity", "_meter", "size", "tensor")

    def __init__(self, meter: SavedTensorMeter, tensor: torch.Tensor, identity: int, size: int) -> None:
        self.tensor, self._meter, self._identity, self.size = tensor, meter, identity, size

    def __del__(self) -> None:
        self._meter.release(self._identity, self.size)


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
