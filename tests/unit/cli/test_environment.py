"""Commands leave the environment, which their ranks inherit, as the user has set it."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli import main
from storage.store import open_store

PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


@pytest.fixture(autouse=True)
def _without_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLUGINS, "")  # so that it is restored
    monkeypatch.delenv(PLUGINS)


@pytest.mark.parametrize("command", ["tune JOB", "launch JOB", "run JOB", "profile JOB", "node nowhere"])
def test_plugins_of_pydantic_stay_on_in_ranks(command: str, tmp_path: Path) -> None:
    words = command.replace("JOB", str(tmp_path / "job.yaml")).split()
    assert CliRunner().invoke(main, words).exit_code == 2
    assert PLUGINS not in os.environ


def test_a_look_up_does_without_them(tmp_path: Path) -> None:
    open_store(f"sqlite:///{tmp_path}/a.db").close()
    assert CliRunner().invoke(main, ["studies", "--db", f"sqlite:///{tmp_path}/a.db"]).exit_code == 0
    assert os.environ[PLUGINS] == "__all__"
