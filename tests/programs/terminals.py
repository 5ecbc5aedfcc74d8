"""A terminal in this process: what is written to `sys.stderr` appears on an emulated screen."""

import os
import pty
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from autotune.cli.display.display import Display
from benchmarks.output.recording import Screen, resize
from tests.programs.processes import wait_for


class Terminal:
    """An emulated terminal, and everything that was written to it."""

    def __init__(self, descriptor: int, columns: int) -> None:
        self._descriptor = descriptor
        self._screen = Screen(columns)
        self._written = b""

    @property
    def written(self) -> bytes:
        self._read()
        return self._written

    def lines(self) -> list[str]:
        """Return the lines that scrolled out of the screen, and those on it."""
        self._read()
        return self._screen.lines()

    @property
    def text(self) -> str:
        return "\n".join(self.lines())

    @property
    def words(self) -> str:
        """Everything on it with single spaces between words, wherever lines are folded."""
        return " ".join(self.text.split())

    def wait_for(self, text: str) -> None:
        """Wait until it shows the text; a display is drawn a few times a second."""
        wait_for(lambda: text in self.words)

    def resize(self, columns: int) -> None:
        self._read()
        resize(self._descriptor, columns)
        self._screen.resize(columns)

    def _read(self) -> None:
        while select.select([self._descriptor], [], [], 0)[0]:
            chunk = os.read(self._descriptor, 1 << 16)
            self._written += chunk
            self._screen.feed(chunk)


@contextmanager
def terminal(
    columns: int, kind: str = "xterm-256color", encoding: str = "utf-8", **variables: str
) -> Iterator[tuple[Display, Terminal]]:
    """Provide the display of a command, and the terminal that is `sys.stderr`.

    Its size is that of every terminal of this process. `variables` are added to the environment.
    """
    ours, theirs = pty.openpty()
    resize(ours, columns)
    size, display = os.get_terminal_size, Display("tune")
    # The stream closes its descriptor.
    stream = open(theirs, "w", encoding=encoding, errors="backslashreplace")  # noqa: PTH123, SIM115
    with pytest.MonkeyPatch.context() as patch, stream:
        patch.setattr(os, "get_terminal_size", lambda *_: size(theirs))
        patch.setattr(sys, "stderr", stream)
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
            patch.delenv(name, raising=False)
        for name, value in {"TERM": kind, **variables}.items():
            patch.setenv(name, value)
        try:
            yield display, Terminal(ours, columns)
        finally:
            display.close()
            os.close(ours)
