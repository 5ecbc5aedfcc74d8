"""Text that is safe for a terminal: names from model folders, drivers and bundles may hold escape sequences."""

import logging
import unicodedata

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Categories of controls, formats such as bidirectional overrides, halves of pairs, and separators of lines."""


def visible(text: str) -> str:
    r"""Return the text with control characters written as `\x1b`; tabs and new lines stay."""
    return "".join(_escaped(char) if _is_hidden(char) else char for char in text)


class VisibleFormatter(logging.Formatter):
    """Log lines as `visible` has them."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _is_hidden(char: str) -> bool:
    return char not in "\n\t" and unicodedata.category(char) in _HIDDEN


def _escaped(char: str) -> str:
    return char.encode("ascii", "backslashreplace").decode() if ord(char) > 0x7F else f"\\x{ord(char):02x}"
