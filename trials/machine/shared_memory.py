"""Shared memory and sockets through which data workers pass packs to their rank; containers often have little."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.reduction import DupFd
from pathlib import Path

from trials.errors import SharedMemoryFull, Unwritable

_PLACE = Path("/dev/shm")  # noqa: S108 (no file of a known name is made there)
MORE = "give a container more, as with `docker run --shm-size=16g` or `--ipc=host`"
"""The remedy."""
LONGEST_FOLDER = 75
"""Bytes of the longest path of a folder for temporary files in which workers can make their sockets. A socket's path
has at most 107 (unix(7)), 32 of which are `/pymp-xxxxxxxx/listener-xxxxxxxx`."""


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


@cache
def check_sockets() -> None:
    """Raise Unwritable where this process cannot make the socket at which its rank fetches packs in shared memory."""
    folder = tempfile.gettempdir()
    try:
        descriptor = os.open(os.devnull, os.O_RDONLY)
        try:
            # The first one makes the socket, by which it comes back here as it would come to a rank.
            os.close(DupFd(descriptor).detach())
        finally:
            os.close(descriptor)
    except OSError as error:
        raise Unwritable(
            f"data workers cannot make sockets in {folder} ({error.strerror or error}), by which they pass packs to "
            f"their rank; set TMPDIR to a folder that stays and has a path of at most {LONGEST_FOLDER} characters, or "
            "set data.workers: 0"
        ) from error


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
