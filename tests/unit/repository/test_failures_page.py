"""The messages that docs/failures.md explains are those of the code."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MESSAGES = re.findall(r'^### "(.+)"$', (ROOT / "docs" / "failures.md").read_text(), flags=re.MULTILINE)
VALUE = "\0"


@cache
def texts() -> str:
    """Return the texts of the code, one per line, with VALUE for each value that is inserted."""
    files = (file for package in ("autotune", "storage", "trials") for file in (ROOT / package).rglob("*.py"))
    return "\n".join(text.replace("\n", " ") for file in files for text in _texts(ast.parse(file.read_text())))


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=parts):
                yield "".join(
                    part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else VALUE
                    for part in parts
                )
            case ast.Constant(value=str(text)):
                yield re.sub(r"%[-.\d]*[sdfgr]|\{[^{}]+\}", VALUE, text).replace("%%", "%")


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_on_the_page_is_one_of_the_code(message: str) -> None:
    parts = (re.escape(part) for part in message.split("..."))
    assert re.search(f"[^\n]*{VALUE}[^\n]*".join(parts), texts()) is not None


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) > 30
