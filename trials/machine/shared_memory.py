"""The shared memory through which data workers pass packs to their rank; containers often have little."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trials.errors import SharedMemoryFull

_PLACE = Path("/dev/shm")  # noqa: S108 (no file of a known name is made there)
MORE = "give a container more, as with `docker run --shm-size=16g` or `--ipc=host`"
"""The remedy."""


def shared_memory_bytes() -> int:
    """Return its size, 0 where there is none."""
    return shutil.disk_usage(_PLACE).total if _PLACE.is_dir() else 0


@contextmanager
def shared_memory(purpose: str) -> Iterator[None]:
    """Raise SharedMemoryFull where it is full in this context."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch raises the second, with the text of the first
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        usage = shutil.disk_usage(_PLACE)
        raise SharedMemoryFull(
            f"shared memory ({_PLACE}) has {_mib(usage.total)}, {_mib(usage.free)} of it free, too little {purpose}; "
            f"{MORE}, or set data.workers: 0"
        ) from error


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
