"""A user of the command line: a job file to spoil, and commands that must be refused."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from autotune.cli import main
from tests.values.training import job_of


class JobFile:
    """A job on the example, which a test spoils."""

    def __init__(self, example: Path, folder: Path) -> None:
        self.path = folder / "job.yaml"
        self.output = folder / "output"
        self._document: dict[str, Any] = job_of(example, self.output).model_dump(mode="json", exclude_none=True)
        self.spoil()

    def spoil(self, **changes: object) -> str:
        """Sets `section__key`, or a whole section, and returns the file's path."""
        for name, value in changes.items():
            section, _, key = name.partition("__")
            self._document[section] = {**self._document[section], key: value} if key else value
        self.path.write_text(yaml.safe_dump(self._document))
        return str(self.path)


def refusal(*arguments: str | Path) -> tuple[int, str]:
    """(exit code, message) of a command that must fail with one message and an empty stdout."""
    answer = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert isinstance(answer.exception, SystemExit), answer.exception
    assert answer.stdout == ""
    _, *messages = re.split("^Error: ", answer.stderr, flags=re.MULTILINE)
    assert len(messages) == 1, answer.stderr
    assert "Traceback" not in answer.stderr
    return answer.exit_code, messages[0].strip()


def document(*arguments: str | Path) -> dict[str, Any]:
    """The JSON document of a command that must succeed."""
    answer = CliRunner().invoke(main, [*map(str, arguments), "--json"])
    assert answer.exit_code == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def databases(folder: Path) -> list[Path]:
    return list(folder.rglob("*.db"))
