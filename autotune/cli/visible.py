"""Text for a terminal. Names come from model folders, drivers and bundles of others, and may hold escape sequences."""

import logging
import unicodedata

_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Categories of controls, formats such as bidirectional overrides, halves of pairs, and separators of lines."""


def visible(text: str) -> str:
    r"""The text with every character that a terminal obeys rather than shows written as `\x1b`; lines stay lines."""
    return "".join(_escaped(char) if _is_hidden(char) else char for char in text)


class VisibleFormatter(logging.Formatter):
    """Log lines as `visible` has them."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _is_hidden(char: str) -> bool:
    return char not in "\n\t" and unicodedata.category(char) in _HIDDEN


def _escaped(char: str) -> str:
    return char.encode("ascii", "backslashreplace").decode() if ord(char) > 0x7F else f"\\x{ord(char):02x}"
