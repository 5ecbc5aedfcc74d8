"""A terminal in this process: what is written to `sys.stderr` appears on an emulated screen."""

import os
import pty
import select
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager

import pyte
import pytest

from autotune.cli.display.display import Display
from benchmarks.recording import ROWS, resize


class Terminal:
    """An emulated terminal, and everything that was written to it."""

    def __init__(self, descriptor: int, columns: int) -> None:
        self._descriptor = descriptor
        self._screen = pyte.HistoryScreen(columns, ROWS, history=1000, ratio=1.0)
        self._stream = pyte.ByteStream(self._screen)
        self.written = b""

    def lines(self) -> list[str]:
        """Return the lines that scrolled out of the screen, and those on it."""
        self._read()
        above = ("".join(line[column].data for column in range(self._screen.columns)) for line in self._above())
        lines = [line.rstrip() for line in (*above, *self._screen.display)]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def text(self) -> str:
        return "\n".join(self.lines())

    @property
    def words(self) -> str:
        """Everything on it with single spaces between words, wherever lines are folded."""
        return " ".join(self.text.split())

    def resize(self, columns: int) -> None:
        self._read()
        resize(self._descriptor, columns)
        self._screen.resize(columns=columns)

    def _above(self) -> "list[pyte.screens.StaticDefaultDict[int, pyte.screens.Char]]":
        return list(self._screen.history.top)

    def _read(self) -> None:
        while select.select([self._descriptor], [], [], 0)[0]:
            chunk = os.read(self._descriptor, 1 << 16)
            self.written += chunk
            self._stream.feed(chunk)


@contextmanager
def terminal(
    columns: int, patch: pytest.MonkeyPatch, kind: str = "xterm-256color", **variables: str
) -> Iterator[tuple[Display, Terminal]]:
    """Provide the display of a command, and the terminal that is `sys.stderr`.

    Its size is that of every terminal of this process.
    """
    ours, theirs = pty.openpty()
    resize(ours, columns)
    attributes = termios.tcgetattr(theirs)
    attributes[1] |= termios.OPOST | termios.ONLCR
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    size = os.get_terminal_size
    patch.setattr(os, "get_terminal_size", lambda *_: size(theirs))
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        patch.delenv(name, raising=False)
    for name, value in {"TERM": kind, **variables}.items():
        patch.setenv(name, value)
    with open(theirs, "w", encoding="utf-8") as stream:  # noqa: PTH123 - a descriptor
        patch.setattr(sys, "stderr", stream)
        display = Display("tune")
        try:
            yield display, Terminal(ours, columns)
        finally:
            display.close()
            os.close(ours)
