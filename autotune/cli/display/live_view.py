"""A live display at a terminal: lines that last, and below them what is done now."""

import re
import time
from queue import Empty, SimpleQueue
from threading import Event as Flag
from threading import Thread

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from autotune.cli.display.board import Board
from autotune.cli.visible import visible
from autotune.events import Event

_REFRESHES_PER_SECOND = 4
_PATIENT_SECONDS = 1.0
"""Longest wait for the terminal, which Ctrl-S may have stopped: the work goes on."""
_SPINNER = "-\\|/"
_BAR_COLUMNS = 28
_INDENT = "  "
_MOST_INDENT = 0.1
"""Of the width: the lines of a trial are indented by more at wide terminals."""


class LiveView:
    """View of the board at the bottom of the terminal. Other output to stderr appears above it.

    A thread of its own writes: a signal, which interrupts the main thread anywhere, tears and repeats no line.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        # Environment variables such as FORCE_COLOR must not change that this is a terminal.
        self._console = Console(
            stderr=True, force_terminal=True, force_interactive=True, markup=False, highlight=False, emoji=False
        )
        self._live = Live(
            self,  # an object that is drawn anew each time, so that text is never printed above an old state
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,  # stdout is for results
        )

        self._texts: SimpleQueue[tuple[str, Flag] | None] = SimpleQueue()
        """Texts to print, each with a flag that is set then; None at the end."""
        self._has_begun = Flag()
        self._thread = Thread(target=self._write, name="display", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._has_begun.wait(_PATIENT_SECONDS)  # until then, other output would not appear above it

    def hear(self, event: Event) -> None:
        if text := self._board.hear(event):
            self.show(text)

    def show(self, text: str) -> None:
        is_printed = Flag()
        self._texts.put((text, is_printed))
        is_printed.wait(_PATIENT_SECONDS)  # so that later output of others follows

    def close(self) -> None:
        self._texts.put(None)
        if self._thread.is_alive():  # a signal may have come before it was started
            self._thread.join()

    def _write(self) -> None:
        with self._live:
            self._has_begun.set()
            while True:
                try:
                    wanted = self._texts.get(timeout=1 / _REFRESHES_PER_SECOND)
                except Empty:
                    self._live.refresh()
                    continue
                if wanted is None:
                    return
                text, is_printed = wanted
                lines = [_hanging(line, self._console.width) for line in visible(text).split("\n")]
                self._console.print(Group(*lines))
                is_printed.set()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the rows of the board, without trailing blanks, which a terminal would wrap when it is made narrower."""
        rows = self._board.rows()
        room = max(len(label) for label, _ in rows) + len(_INDENT) + 1
        frame = _SPINNER[int(time.monotonic() * _REFRESHES_PER_SECOND) % len(_SPINNER)]
        for number, (label, text) in enumerate(rows):
            start = visible(f"{_INDENT if number else f'{frame} '}{label}").ljust(room)
            for line in Text(visible(text)).wrap(console, max(options.max_width - room, 1), overflow="fold"):
                yield Text.assemble((start, "bold"), line)
                start = " " * room
        if (share := self._board.share) is not None:
            yield Padding(ProgressBar(total=1.0, completed=share, width=_BAR_COLUMNS), (0, 0, 0, room), expand=False)


def _hanging(line: str, width: int) -> RenderableType:
    """Return a line whose further lines, where it is wrapped, have its indent."""
    text = line.lstrip(" ")
    indent = min(len(line) - len(text), int(_MOST_INDENT * width))
    if indent + len(text) > width:
        text = re.sub(" {2,}", "  ", text)  # columns have no use in several lines
    return Padding(Text(text, overflow="fold"), (0, 0, 0, indent), expand=False)
