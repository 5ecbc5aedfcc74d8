"""Records what a command writes, at a terminal of some width or to a pipe, with the time of each piece."""

import fcntl
import os
import pty
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pyte

ROWS = 30
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The output of a command, stdout and stderr together."""

    columns: int | None
    """Width of the terminal; None for a pipe."""
    chunks: tuple[tuple[float, bytes], ...]
    """Pieces of output, with the seconds since the start at which they came."""
    seconds: float
    """Duration of the command."""
    exit_code: int

    @property
    def text(self) -> str:
        return b"".join(chunk for _, chunk in self.chunks).decode()

    def longest_silence(self) -> tuple[float, str]:
        """Return the longest time without output, before its end included, and the last line before it."""
        times = [0.0, *(at for at, _ in self.chunks), self.seconds]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        worst = max(range(len(gaps)), key=gaps.__getitem__)
        before = b"".join(chunk for _, chunk in self.chunks[:worst]).decode(errors="replace").splitlines()
        return gaps[worst], before[-1] if before else ""

    def screen(self, at: float | None = None, resized: tuple[float, int] | None = None) -> list[str]:
        """Return the lines that a terminal shows, after all output or after that of the first `at` seconds.

        `resized` is the time of a change of the width, and the new width.
        """
        screen = pyte.HistoryScreen(self.columns or 80, ROWS, history=10_000, ratio=1.0)
        stream = pyte.ByteStream(screen)
        for when, chunk in self.chunks:
            if at is not None and when > at:
                break
            if resized and when > resized[0] and screen.columns != resized[1]:
                screen.resize(columns=resized[1])
            stream.feed(chunk)
        above = ("".join(line[column].data for column in range(screen.columns)) for line in screen.history.top)
        lines = [line.rstrip() for line in (*above, *screen.display)]
        while lines and not lines[-1]:
            lines.pop()
        return lines


def record(
    command: Sequence[str | Path],
    columns: int | None,
    *,
    folder: Path,
    environment: Mapping[str, str],
    on_output: Callable[[int, int, bytes], None] = lambda *_: None,
) -> Recording:
    """Run the command at a terminal, or with a pipe where `columns` is None.

    `on_output` is called with its process id, the descriptor of the terminal or the pipe, and each piece of output.
    """
    ours, theirs = os.pipe() if columns is None else pty.openpty()
    if columns is not None:
        resize(theirs, columns)
    began = time.monotonic()
    process = subprocess.Popen(
        # Else Ctrl-C, written to the terminal, would be no signal for the command.
        [*(("setsid", "--ctty") if columns is not None else ()), *map(str, command)],
        cwd=folder,
        env={**os.environ, "TERM": "xterm-256color", **environment},
        stdin=theirs if columns is not None else subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    chunks = []
    with suppress(OSError):  # a terminal whose last process has ended
        while chunk := os.read(ours, _CHUNK):
            chunks.append((time.monotonic() - began, chunk))
            on_output(process.pid, ours, chunk)
    exit_code = process.wait()
    os.close(ours)
    return Recording(columns=columns, chunks=tuple(chunks), seconds=time.monotonic() - began, exit_code=exit_code)


def resize(terminal: int, columns: int) -> None:
    """Set the size of a terminal. Its foreground processes get SIGWINCH."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
