"""Text tables."""

import shutil
import sys
import textwrap
from collections.abc import Sequence
from itertools import zip_longest

PIPE_WIDTH = 120
"""Most characters of a line of a wide table of plans where no terminal says how many fit."""
_GAP = "  "


def fitted(text: str, width: int | None = None) -> str:
    """Return the text with lines that are longer than `width` folded between words, with the indent of their line.

    Lines of a chart, with a word that does not fit, stay. `width` is by default that of the terminal; without a
    terminal lines are not folded.
    """
    width = width or terminal_width() or sys.maxsize
    return "\n".join(line if len(line) <= width else _folded(line, width) for line in text.split("\n"))


def _folded(line: str, width: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    if len(indent) + max(map(len, line.split())) > width:
        return line
    lines = textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def terminal_width() -> int | None:
    """Return the characters of a line of the terminal; None where the output goes elsewhere."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if is_terminal else None


def table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Return columns as wide as their widest entry, folded between words where lines are longer than `width`.

    Where even single words need more, each row is a paragraph with a line per column. `width` is by default that
    of the terminal; without a terminal lines are not folded.
    """
    width = width or terminal_width() or sys.maxsize
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = [max((len(word) for entry in column for word in entry.split()), default=0) for column in columns]
    spare = width - len(_GAP) * (len(columns) - 1)
    if sum(least) > spare:
        label = max(map(len, header))
        paragraphs = (
            [f"{name:<{label}}{_GAP}{entry}".rstrip() for name, entry in zip(header, row, strict=True) if entry]
            for row in rows
        )
        return "\n\n".join(map("\n".join, paragraphs))
    # Takes columns from the widest one, so that narrow ones such as ids and numbers stay whole.
    while sum(widths) > spare:
        widest = max(
            (number for number in range(len(widths)) if widths[number] > least[number]), key=widths.__getitem__
        )
        widths[widest] -= 1
    folded = []
    for row in (header, *rows):
        entries = [
            # Most entries fit, and to wrap them would take most of the time of a large table.
            [entry] if entry and entry.isprintable() and len(entry) <= width else textwrap.wrap(entry, max(width, 1))
            for entry, width in zip(row, widths, strict=True)
        ]
        folded.append(
            [
                _GAP.join(f"{part:<{width}}" for part, width in zip(parts, widths, strict=True)).rstrip()
                for parts in zip_longest(*entries, fillvalue="")
            ]
        )
    first, *others = folded
    return "\n".join((*first, "-" * max(map(len, first)), *(line for lines in others for line in lines)))
