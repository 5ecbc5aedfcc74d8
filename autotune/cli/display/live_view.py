"""A live display at a terminal: lines that last, and below them what is done now."""

import re
import time

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from autotune.cli.display.board import Board
from autotune.cli.visible import visible
from autotune.events import Event

_REFRESHES_PER_SECOND = 4
_SPINNER = "-\\|/"
_BAR_COLUMNS = 28
_INDENT = "  "
_MOST_INDENT = 0.1
"""Of the width: the lines of a trial are indented by more at wide terminals."""


class LiveView:
    """Draws the board at the bottom of the terminal. Other output to stderr appears above it."""

    def __init__(self, board: Board) -> None:
        self._board = board
        # Environment variables such as FORCE_COLOR must not change that this is a terminal.
        self._console = Console(
            stderr=True, force_terminal=True, force_interactive=True, markup=False, highlight=False, emoji=False
        )
        self._live = Live(
            self,  # an object that is drawn anew each time, so that text is never printed above an old state
            console=self._console,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,  # stdout is for results
        )

    def start(self) -> None:
        self._live.start(refresh=True)

    def hear(self, event: Event) -> None:
        if text := self._board.hear(event):
            self.tell(text)

    def tell(self, text: str) -> None:
        lines = [_hanging(line, self._console.width) for line in visible(text).split("\n")]
        self._console.print(Group(*lines))

    def close(self) -> None:
        self._live.stop()

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
