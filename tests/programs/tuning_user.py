"""A user of the command line with two ranks, who tunes and goes on from there."""

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from autotune.cli import main
from tests.values.training import job_of

SEARCH = {"trials": 4, "time_limit": "90s", "warmup_steps": 0, "timed_steps": 1, "confirm_rounds": 1}


ELSEWHERE = (
    "import platform, sys; host = sys.argv.pop(1); platform.node = lambda: host; from autotune.machine import agent;"
    "agent.Agent.__init__.__defaults__ = (1.0,); from autotune.cli import main; main()"
)
"""Starts the program on a machine of another name, where silence is noticed sooner."""


class User:
    """A user with a job and a data folder that holds the profile of the layers."""

    def __init__(
        self, example: Path, folder: Path, devices: int = 2, *, host: str | None = None, **search: Any
    ) -> None:
        """Use this machine, or one with another name."""
        self._program = ["-m", "autotune"] if host is None else ["-c", ELSEWHERE, host]
        job = job_of(
            example,
            folder / "output",
            hardware={"devices": devices},
            search={**SEARCH, **search},
            data={"sources": [{"path": str(example / "data" / "train.jsonl"), "sampling": "first:24"}]},
            training={"global_batch_samples": 8},
        )
        folder.mkdir(exist_ok=True)
        self.job = folder / "job.yaml"
        self.job.write_text(yaml.safe_dump(job.model_dump(mode="json", exclude_none=True)))
        self.output = folder / "output"
        self.database = folder / "data" / "autotune" / "autotune.db"
        self.url = f"sqlite:///{self.database}"
        self.homes = {"XDG_DATA_HOME": str(folder / "data"), "XDG_CACHE_HOME": str(folder / "cache")}
        self.first: dict[str, Any] = {}
        """What the first tuning answered."""

    @contextmanager
    def environment(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("AUTOTUNE_DB_URL", raising=False)
            for name, folder in self.homes.items():
                patch.setenv(name, folder)
            yield

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        with self.environment():
            return subprocess.Popen(
                [sys.executable, *self._program, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )

    def run(self, *arguments: str) -> tuple[dict[str, Any], str]:
        """Return (JSON document on stdout, text on stderr)."""
        with self.environment():
            answer = CliRunner().invoke(main, [*arguments, "--json"])
        assert answer.exit_code == 0, answer.stderr
        return json.loads(answer.stdout), answer.stderr

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(self.database) as connection:
            return connection.execute(query).fetchall()
