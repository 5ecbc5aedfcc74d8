"""The display of one command, which listens to the events of its work."""

import os
import sys
from threading import RLock, Timer
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from autotune.events import Event, Phase

_LATE_SECONDS = 2.0
"""Work that takes longer is displayed at a terminal even without an event, such as a connection to a database."""
_NO_TERMINALS = ("", "dumb", "unknown")


class View(Protocol):
    """One way to show events."""

    def start(self) -> None:
        """Begin to show that the work goes on."""

    def hear(self, event: "Event") -> None:
        """Show the event."""

    def show(self, text: str) -> None:
        """Show text that lasts."""

    def close(self) -> None:
        """Remove what does not last."""


class Display:
    """Display of events on stderr: live at a terminal, else as lines, and not at all when `quiet`.

    After `close`, the next event opens it again.
    """

    def __init__(self, name: str = "autotune", *, quiet: bool = False) -> None:
        """`name` is shown until the first phase begins."""
        self._name = name
        self._quiet = quiet
        self.phase: Phase | None = None
        """Phase that began last; None before the first."""
        self._lock = RLock()
        self._view: View | None = None
        self._timer: Timer | None = None

    def expect_work(self) -> None:
        """Open the display at a terminal after some seconds, unless it is closed before."""
        if not self._quiet and is_terminal():
            self._timer = Timer(_LATE_SECONDS, self._open_late)
            self._timer.daemon = True
            self._timer.start()

    def __call__(self, event: "Event", /) -> None:
        self.phase = getattr(event, "phase", self.phase)
        if not self._quiet:
            self._open().hear(event)

    def show(self, text: str) -> None:
        """Show text that lasts."""
        if not self._quiet:
            self._open().show(text)

    def close(self) -> None:
        """Clear the display, so that others may write to the terminal."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._view is not None:
                self._view.close()
                self._view = None

    def _open_late(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._open()

    def _open(self) -> View:
        with self._lock:
            if self._view is None:
                # Assigned first: a signal may end `start` in the middle.
                self._view = _view(self._name)
                self._view.start()
            return self._view


def is_terminal() -> bool:
    """Return whether stderr is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM", "") not in _NO_TERMINALS


def _view(name: str) -> View:
    # Look-ups need none of these imports.
    from autotune.cli.display.board import Board

    board = Board(name)
    if is_terminal():
        from autotune.cli.display.live_view import LiveView

        return LiveView(board)
    from autotune.cli.display.line_view import LineView

    return LineView(board)
