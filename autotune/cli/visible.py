"""Text that is safe for a terminal: names from model folders, drivers and bundles may hold escape sequences."""

import logging
import unicodedata

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Categories of controls, formats such as bidirectional overrides, halves of pairs, and separators of lines."""


def visible(text: str) -> str:
    r"""Return the text with control characters written as `\x1b`; tabs and new lines stay."""
    lines = text.split("\n")
    return "\n".join(line if line.isprintable() else "".join(map(_shown, line)) for line in lines)


class VisibleFormatter(logging.Formatter):
    """Formatter of log lines that applies `visible`."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _shown(char: str) -> str:
    if char == "\t" or unicodedata.category(char) not in _HIDDEN:
        return char
    # `backslashreplace` leaves ASCII controls as they are.
    return char.encode("ascii", "backslashreplace").decode() if ord(char) > 0x7F else f"\\x{ord(char):02x}"
