"""Commands that start nodes, and what is left of those that end at once."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trials.errors import NodesMissing
from trials.launchers.command_starter import CommandStarter, Spot


class Ended(subprocess.Popen[bytes]):
    """A process that has ended before anything is written to it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.wait()


class Refusing:
    """A tool, and a way to other nodes, that say why they end."""

    uses_store, passes_environment = False, False

    def command(self, _: Spot | str, program: Sequence[str], *, is_module: bool = False) -> tuple[str, ...]:
        return ("sh", "-c", "echo no route to host; exit 255")


def test_a_node_whose_command_ends_before_it_reads_the_token_is_named_and_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", Ended)
    way, hosts = Refusing(), ("here", "there")
    starter = CommandStarter(way, (1, 1), "127.0.0.1", tmp_path, hosts=hosts, reach=way, show=lambda _: None)
    starter.start("127.0.0.1:1", "secret")
    with pytest.raises(NodesMissing, match=r"node 0 \(here\) has ended with exit code 255 .*: no route to host"):
        starter.check(1)
    starter.check(0)
    starter.end()
    assert [*tmp_path.rglob("token")] == []


def test_two_commands_of_one_database_have_tokens_and_output_of_their_own(tmp_path: Path) -> None:
    way = Refusing()
    first, second, third = (
        CommandStarter(way, (1,), "127.0.0.1", tmp_path, hosts=None, reach=way, show=lambda _: None) for _ in range(3)
    )
    first.start("127.0.0.1:1", "of the first")
    second.start("127.0.0.1:2", "of the second")
    assert sorted(file.read_text() for file in tmp_path.rglob("token")) == ["of the first", "of the second"]
    first.end()
    assert [file.read_text() for file in tmp_path.rglob("token")] == ["of the second"]
    assert len([*tmp_path.rglob("node-0.log")]) == 2
    third.start("127.0.0.1:3", "of the third")  # in the place of the first
    assert len([*tmp_path.rglob("node-0.log")]) == 2
    for each in (second, third):
        each.end()
