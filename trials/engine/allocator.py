"""What the statistics of torch's CUDA allocator say of a rank's memory.

The allocator rounds each tensor up, keeps what was released for later tensors, and cannot join pieces of different
blocks. Outside of it a device holds the CUDA context of the process, its libraries, and other processes.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

# The units in which torch's allocator writes sizes (`format_size` in c10/cuda/CUDACachingAllocator.cpp).
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = rf"(\d+(?:\.\d+)?) ({'|'.join(_UNITS)})"
_TRIED, _IN_TENSORS = re.compile(rf"[Tt]ried to allocate {_SIZE}"), re.compile(rf"{_SIZE} is allocated by PyTorch")
# What CUDA, NCCL, cuBLAS and cuDNN write when the device has no room for memory of their own.
_OF_LIBRARIES = re.compile(
    r"(?:CUDA error:|Cuda failure [\d ]*')\s*out of memory|Failed to CUDA calloc|(?:CUBLAS|CUDNN)_STATUS_ALLOC_FAILED"
)
# What the last two write as well when they cannot make a handle, which has other causes, too.
_NO_HANDLE = re.compile(r"(?:CUBLAS|CUDNN)_STATUS_NOT_INITIALIZED")
# A choice, not measured: a handle takes some MiB, and the default limit leaves 1 GiB or more outside of the allocator.
_HARDLY_ANY = 64 << 20
"""Free bytes of a device up to which a handle has had no room there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorPeaks:
    """The most bytes since the peaks were reset."""

    requested: int
    """Bytes that tensors asked for."""
    allocated: int
    """Bytes of tensors, each rounded up to a multiple of 512."""
    reserved: int
    """Bytes that the allocator took from the device."""
    retries: int
    """Number of times that it returned its cache to the device, to find room for a tensor."""

    @classmethod
    def of(cls, statistics: Mapping[str, int]) -> "AllocatorPeaks":
        """Read `torch.cuda.memory_stats`."""
        requested, allocated, reserved = (
            int(statistics.get(f"{kind}_bytes.all.peak", 0)) for kind in ("requested", "allocated", "reserved")
        )
        retries = int(statistics.get("num_alloc_retries", 0))
        return cls(requested=requested, allocated=allocated, reserved=reserved, retries=retries)

    @property
    def rounding(self) -> int:
        """Bytes that rounding adds; the two peaks may be of different moments."""
        return max(0, self.allocated - self.requested)

    @property
    def fragmentation(self) -> int:
        """Bytes that are kept, or lie between tensors."""
        return max(0, self.reserved - self.allocated)

    @property
    def peak_bytes(self) -> int:
        """Bytes that have to fit: those in tensors, and all that is reserved once there was no room for kept memory.

        Without a retry the allocator reserves more than it needs.
        """
        return self.allocated if self.retries == 0 else max(self.allocated, self.reserved)


def usable_bytes(memory_limit_bytes: int, *, total: int, free: int, reserved: int) -> int:
    """Return the bytes that the allocator can reserve under a limit on a device of `total` bytes.

    `free` bytes are in nobody's use, and `reserved` ones in this process's allocator. What is neither is outside of it:
    contexts, libraries and other processes.
    """
    outside = total - free - reserved
    return min(memory_limit_bytes, total - outside)


def is_out_of_memory(error: Exception, free_bytes: Callable[[], int]) -> bool:
    """Return whether the device had no room: for a tensor, or for what a library takes outside of the allocator.

    `free_bytes` reads what is left of the device, where the error alone does not tell. After the error of a kernel,
    which comes with libraries in the same words, CUDA refuses that, and the RuntimeError passes.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return bool(_OF_LIBRARIES.search(text) or (_NO_HANDLE.search(text) and free_bytes() <= _HARDLY_ANY))


def needed_bytes(message: str, limit_bytes: int) -> int:
    """Return the bytes that a rank would have needed at least, from the message of its error.

    A tensor that found no room comes on top of what was in tensors then, which may be far below the peak. With the
    pieces between tensors, and what libraries take, that is more than the limit, or there would have been room.
    """
    return max(limit_bytes, _size(_TRIED, message) + _size(_IN_TENSORS, message))


def _size(pattern: re.Pattern[str], message: str) -> int:
    found = pattern.search(message)
    return round(float(found[1]) * _UNITS[found[2]]) if found else 0
