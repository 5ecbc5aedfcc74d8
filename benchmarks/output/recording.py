"""Records what a command writes, at a terminal of some width or to a pipe, with the time of each piece."""

import fcntl
import os
import pty
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pyte

ROWS = 30
_CHUNK = 1 << 16
_NOTED = 4000
"""Characters of the output that an error shows."""


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
    def output(self) -> bytes:
        return b"".join(chunk for _, chunk in self.chunks)

    @property
    def text(self) -> str:
        return self.output.decode()

    def silences(self, count: int) -> list[tuple[float, str]]:
        """Return the longest times without output, longest first, each with the last line before it."""
        times = [0.0, *(at for at, _ in self.chunks), self.seconds]
        gaps = sorted(
            ((later - earlier, number) for number, (earlier, later) in enumerate(pairwise(times))), reverse=True
        )
        return [(seconds, self._last_line(number)) for seconds, number in gaps[:count]]

    def _last_line(self, count: int) -> str:
        """Return the last line of the first `count` pieces."""
        before = b"".join(chunk for _, chunk in self.chunks[:count]).decode(errors="replace").splitlines()
        return before[-1] if before else ""

    def screen(self) -> list[str]:
        """Return the lines of the terminal in the end, those that scrolled out of it included."""
        screen = Screen(self.columns or 80)
        screen.feed(self.output)
        return screen.lines()

    def screens(self) -> Iterator[list[str]]:
        """Yield the lines that were visible on the terminal after each piece of output."""
        screen = Screen(self.columns or 80)
        for _, chunk in self.chunks:
            screen.feed(chunk)
            yield screen.visible()


class Screen:
    """An emulated terminal."""

    def __init__(self, columns: int) -> None:
        self._screen = pyte.HistoryScreen(columns, ROWS, history=10_000, ratio=1.0)
        self._stream = pyte.ByteStream(self._screen)

    def feed(self, output: bytes) -> None:
        self._stream.feed(output)

    def resize(self, columns: int) -> None:
        self._screen.resize(columns=columns)

    def lines(self) -> list[str]:
        """Return the lines that scrolled out of the screen, and those on it."""
        columns = range(self._screen.columns)
        above = ["".join(line[column].data for column in columns).rstrip() for line in self._screen.history.top]
        return [*above, *self.visible()]

    def visible(self) -> list[str]:
        """Return the lines on the screen."""
        lines = [line.rstrip() for line in self._screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines


def record(
    command: Sequence[str | Path],
    columns: int | None,
    *,
    folder: Path,
    environment: Mapping[str, str],
    on_output: Callable[[int, int, bytes], bool | None] = lambda *_: None,
) -> Recording:
    """Run the command at a terminal, or with a pipe where `columns` is None.

    `on_output` is called with its process id, the descriptor of the terminal or the pipe, and each piece of output.
    Once it has returned True, the terminal or the pipe is closed.
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
    chunks: list[tuple[float, bytes]] = []
    try:
        with suppress(OSError):  # a terminal whose last process has ended
            while chunk := os.read(ours, _CHUNK):
                chunks.append((time.monotonic() - began, chunk))
                if on_output(process.pid, ours, chunk):
                    break
        os.close(ours)
        exit_code = process.wait()
    except BaseException as error:  # such as the time limit of a test
        process.kill()
        process.wait()
        written = b"".join(chunk for _, chunk in chunks).decode(errors="replace")
        error.add_note(f"Its output ended so:\n{written[-_NOTED:]}")
        raise
    return Recording(columns=columns, chunks=tuple(chunks), seconds=time.monotonic() - began, exit_code=exit_code)


def resize(terminal: int, columns: int) -> None:
    """Set the size of a terminal. Its foreground processes get SIGWINCH."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
