"""Regular files only: a pipe, socket or device may block its reader or never end."""

import stat
from pathlib import Path
from typing import IO

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""Start of what a clone without Git LFS has in the place of a file."""


def check_regular(path: Path) -> int:
    """Return the size of the file or folder. Raise OSError like `Path.stat`, and for a pipe, socket or device."""
    found = path.stat()
    kind = _KINDS.get(stat.S_IFMT(found.st_mode))
    if kind:
        raise OSError(f"it is {kind}, not a regular file")
    return found.st_size


def open_regular(path: Path) -> IO[bytes]:
    """Open the file for reading. Raise OSError like `Path.open`, and for a pipe, socket or device."""
    check_regular(path)  # before it is opened: a pipe without a writer would block
    return path.open("rb")


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the content of the file. Raise OSError like `open_regular`, and for more than `most_bytes`."""
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(f"it is larger than {most_bytes >> 20} MiB")
    return content
