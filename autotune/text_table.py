"""Rows in columns, as text."""

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

_GAP = "  "


def table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """Return columns as wide as their widest entry, folded between words where lines are longer than `width`.

    Where even single words need more, each row is a paragraph with a line per column. `width` is that of the terminal;
    lines that go elsewhere have any length.
    """
    width = width or (
        shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else sys.maxsize
    )
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    least = [max((len(word) for entry in column for word in entry.split()), default=0) for column in columns]
    spare = width - len(_GAP) * (len(columns) - 1)
    if sum(least) > spare:
        return "\n\n".join(_paragraph(header, row) for row in rows)
    while sum(widths) > spare:
        widest = max(
            (number for number in range(len(widths)) if widths[number] > least[number]), key=widths.__getitem__
        )
        widths[widest] -= 1
    first, *others = [list(_folded(row, widths)) for row in (header, *rows)]
    return "\n".join((*first, "-" * max(map(len, first)), *(line for lines in others for line in lines)))


def _folded(row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
    """The lines of a row."""
    entries = [textwrap.wrap(entry, max(width, 1)) for entry, width in zip(row, widths, strict=True)]
    for parts in zip_longest(*entries, fillvalue=""):
        yield _GAP.join(f"{part:<{width}}" for part, width in zip(parts, widths, strict=True)).rstrip()


def _paragraph(header: Sequence[str], row: Sequence[str]) -> str:
    label = max(map(len, header))
    return "\n".join(f"{name:<{label}}{_GAP}{entry}".rstrip() for name, entry in zip(header, row, strict=True) if entry)
