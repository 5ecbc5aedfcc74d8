"""What a process does with the memory that it frees: keep it for what it allocates next, or return it.

Torch keeps what it took from a device, and page-locked memory of the host, whose blocks it uses again for tensors of
about their size alone: what plans with packs of several sizes have locked would add up.

By default the C library may return freed memory to the system whenever much of it is free at once, as after each
backward pass. The system then clears each page again in the next forward pass, which may take a third longer.
"""

import ctypes

import torch

# From malloc.h of glibc.
_TRIM_THRESHOLD, _MAPPING_THRESHOLD = -1, -3
_NEVER = -1
# The most that glibc documents, and where it ends when it adapts the threshold itself. Larger tensors are returned
# when they are freed: in the heap they would leave gaps, since an aligned allocation does not fit where one was freed.
_MAPPED_BYTES = 32 << 20


def keep_freed_memory() -> None:
    """Let this process keep what it frees from now on; nothing happens where the C library is not glibc."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_TRIM_THRESHOLD, _NEVER)
        library.mallopt(_MAPPING_THRESHOLD, _MAPPED_BYTES)


def return_freed_memory() -> None:
    """Return what this process has freed to the device, and to the system where the C library is glibc."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()  # not in torch.cuda; the name in torch.accelerator is newer
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
