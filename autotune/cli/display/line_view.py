"""Events as lines, where stderr is no terminal, and a line now and then while nothing happens."""

import time
from threading import Event as Flag
from threading import Thread

import click

from autotune.cli.display.board import Board, Clock
from autotune.cli.visible import visible
from autotune.events import Event

# Choices: the first lines show that it works, and later ones need not fill a log.
_EVERY_SECONDS, _SELDOM_SECONDS, _GROWTH = 4.0, 30.0, 0.2
"""Seconds between lines: at first, at most, and as a share of the phase, so that a long one does not fill its log."""


class LineView:
    """View of lines that last, and of what is done now when none came for some seconds."""

    def __init__(self, board: Board, clock: Clock = time.monotonic) -> None:
        self._board = board
        self._clock = clock
        self._written = clock()
        self._closed = Flag()
        self._thread = Thread(target=self._watch, name="display", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hear(self, event: Event) -> None:
        if text := self._board.hear(event):
            self.show(text)

    def show(self, text: str) -> None:
        self._written = self._clock()
        click.echo(visible(text), err=True)

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():  # a signal may have come before it was started
            self._thread.join()  # so that no line follows the output of others

    def look(self) -> float:
        """Write a line if none came for long; return the seconds until the next look."""
        every = min(max(_EVERY_SECONDS, _GROWTH * self._board.seconds), _SELDOM_SECONDS)
        left = self._written + every - self._clock()
        if left > 0:
            return left
        self.show(self._board.line())
        return every

    def _watch(self) -> None:
        while not self._closed.wait(self.look()):
            pass
