"""Commands that messages name can be typed as they stand there."""

import ast
import re
import shlex
from collections.abc import Iterator

import click
import pytest

from autotune.cli import main
from tests.unit.repository.test_docs import ROOT

PACKAGES = ("autotune", "storage", "trials")
GROUPS = {"autotune db", "autotune studies", "autotune node"}
"""Commands that name themselves."""
_QUOTED = re.compile(r"`(autotune [^`]*)`")


def texts(tree: ast.AST) -> Iterator[str]:
    """The texts of a module but its docstrings; what is filled in is X."""
    of_docs = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    of_others = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {node} & (of_docs | of_others):
            yield node.value


@pytest.fixture(scope="module")
def messages() -> tuple[str, ...]:
    files = (path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return tuple(text for path in files for text in texts(ast.parse(path.read_text(encoding="utf-8"))))


def parsed(command: str) -> None:
    """Parse a command without running it. Raise UsageError."""
    words = shlex.split(command)[1:]
    context = main.make_context("autotune", words)
    group: click.Group = main
    while isinstance(group, click.Group):
        name, found, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None
        context = found.make_context(name, rest, parent=context)
        if not isinstance(found, click.Group):
            return
        group = found


def test_commands_that_messages_name_can_be_parsed(messages: tuple[str, ...]) -> None:
    commands = {command for text in messages for command in _QUOTED.findall(text)} - GROUPS
    assert len(commands) > 20
    for command in sorted(commands):
        try:
            parsed(command)
        except click.UsageError as error:
            error.add_note(f"in `{command}`")
            raise


def test_a_command_without_its_argument_is_not_taken_for_a_good_one() -> None:
    for wrong in ("autotune profile --fresh", "autotune tune", "autotune show", "autotune studies --nonsense"):
        with pytest.raises(click.UsageError):
            parsed(wrong)


def test_no_message_installs_the_package_itself_which_no_index_has(messages: tuple[str, ...]) -> None:
    assert not [text for text in messages if "vlm-autotune[" in text]
