"""Standard streams for work that goes on when its reader leaves, its disk is full, or a descriptor was closed."""

import io
import os
import sys
from typing import TextIO

from typing_extensions import Buffer


class _LossyFile(io.FileIO):
    """Drops what cannot be written."""

    def write(self, data: Buffer, /) -> int:
        try:
            # None where the descriptor does not block and its pipe is full.
            return super().write(data) or memoryview(data).nbytes
        except OSError:
            return memoryview(data).nbytes


def hold_descriptors() -> None:
    """Opens the null device for each standard descriptor that is closed.

    Else the next file to be opened would get its number, and with it the messages of native libraries and children.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # POSIX gives the lowest number that is free


def lossy(stream: TextIO | None, number: int) -> TextIO:
    """A stream in place of `stream`, the one of that descriptor, None for a closed one. Its writes never fail."""
    return io.TextIOWrapper(
        io.BufferedWriter(_LossyFile(number, "w", closefd=False)),
        encoding=stream.encoding if stream else "utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def keep_stderr_open() -> None:
    """Lets no write to `sys.stderr` fail, those at the interpreter's end included.

    A stream that a caller put in its place is left alone.
    """
    hold_descriptors()
    if sys.stderr is sys.__stderr__:
        sys.stderr = lossy(sys.stderr, 2)
