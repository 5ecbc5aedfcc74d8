"""Standard streams whose writes never fail: their reader may end, a disk be full, a descriptor be closed."""

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer


class _LossyFile(io.FileIO):
    """File that drops what cannot be written."""

    def write(self, data: "Buffer", /) -> int:
        try:
            # None where the descriptor does not block and its pipe is full.
            return super().write(data) or memoryview(data).nbytes
        except OSError:
            return memoryview(data).nbytes


def hold_descriptors() -> None:
    """Open the null device for each standard descriptor that is closed.

    Otherwise the next opened file would get its number, and with it the output of native libraries and children.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # POSIX gives the lowest number that is free


def lossy(stream: TextIO | None, number: int) -> TextIO:
    """Return a replacement for `stream`, on descriptor `number`, whose writes never fail; None is a closed stream."""
    return io.TextIOWrapper(
        io.BufferedWriter(_LossyFile(number, "w", closefd=False)),
        encoding=stream.encoding if stream else "utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )


def keep_stderr_open() -> None:
    """Replace `sys.stderr` by a stream whose writes never fail, even at the interpreter's exit.

    A stream that a caller has put in its place stays.
    """
    hold_descriptors()
    if sys.stderr is sys.__stderr__:
        sys.stderr = lossy(sys.stderr, 2)
