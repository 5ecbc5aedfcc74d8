"""The commands of the tutorial, in order, as a reader runs them in a clone."""

import json
import re
import runpy
import shlex
import shutil
import subprocess
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli import main

pytestmark = [pytest.mark.long, pytest.mark.ranks]

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial.md"
SHORTER = {
    "--folder tutorial": "--folder tutorial --samples 48",
    "--time-limit 3min": "--time-limit 3min --trials 3 --set search.timed_steps=1 --set search.confirm_rounds=1",
}
"""What the test adds to save time: fewer samples and trials. The model has fewer and narrower layers, too."""

WINNER = r"^Plan ([0-9a-f]{16})$"
TRIED = r"^ *trial \d+  \S+  .*\n +([0-9a-f]{16})  "
"""Where `tune` prints the ids of the winner and of each trial's plan."""

IDS = ("PLAN", "DEFAULT")
"""The names in whose place a reader writes an id."""


class Reader:
    """Runs the commands in a folder that looks like a clone."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        (folder / "examples").symlink_to(ROOT / "examples")
        patch.chdir(folder)
        patch.delenv("AUTOTUNE_DB_URL", raising=False)
        for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
            patch.setenv(name, str(folder / "home" / name))
        self.url = f"sqlite:///{folder}/home/XDG_DATA_HOME/autotune/autotune.db"
        self.said: dict[str, list[str]] = {}
        """Stdout and stderr of every run, by command of autotune."""

    def type(self, line: str) -> None:
        """Run a line with ids in place of names."""
        program, *arguments = shlex.split(line)
        if program == "python":
            with self._patch.context() as patch:
                patch.setattr("sys.argv", arguments)
                patch.syspath_prepend(str(ROOT / Path(arguments[0]).parent))
                runpy.run_path(arguments[0], run_name="__main__")
        elif program == "autotune":
            arguments = [self.id_of(word) if word in IDS else word for word in arguments]
            answer = CliRunner().invoke(main, arguments)
            assert answer.exit_code == 0, f"{line}\n{answer.output}"
            self.said.setdefault(arguments[0], []).append(answer.output)
        else:
            subprocess.run([program, *arguments], check=True)

    def id_of(self, name: str) -> str:
        """Return the winner's id for PLAN, and for DEFAULT that of another plan, since the default plan may win."""
        output = self.said["tune"][0]
        (winner,) = re.findall(WINNER, output, flags=re.MULTILINE)
        tried = re.findall(TRIED, output, flags=re.MULTILINE)
        return str(winner if name == "PLAN" else next(plan for plan in tried if plan != winner))


def test_every_command_of_the_tutorial_does_what_it_says(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, give_profile: Callable[..., None]
) -> None:
    reader = Reader(tmp_path, monkeypatch)
    shutil.copytree(shallow, tmp_path / "tutorial", symlinks=True)  # the generator finds it up to date
    give_profile(reader.url, example=shallow)
    commands = re.findall(r"^\$ (.+)$", TUTORIAL.read_text(), flags=re.MULTILINE)
    assert all(any(part in line for line in commands) for part in SHORTER)
    for line in commands:
        reader.type(reduce(lambda text, part: text.replace(part, SHORTER[part]), SHORTER, line))
    said = reader.said
    assert "48 samples" in said["doctor"][0]
    assert "No problems found." in said["doctor"][0]
    assert all(f"{metric} ratio" in said["pack"][0] for metric in ("pad", "dist"))
    first, again = said["tune"]
    assert "default" in first
    assert re.search(r"^ *trial 0 ", first, flags=re.MULTILINE)
    assert not re.search(r"^ *trial \d", again, flags=re.MULTILINE)
    assert "Why it won" in first
    assert "part of an epoch" in said["show"][0]
    assert all(reader.id_of(name) in said["compare"][0] for name in IDS)
    assert "useful work" in said["predict"][0]
    assert (tmp_path / "tutorial" / "report.html").is_file()
    dry, stopped, resumed = said["launch"]
    assert "step 1/3" not in dry
    assert "step 2/3" in stopped
    assert "step 3/3" not in stopped
    assert "step 3/3" in resumed
    assert "step 1/3" not in resumed
    output = tmp_path / "tutorial" / "output"
    assert [json.loads(line)["step"] for line in (output / "progress.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert (output / "model" / "config.json").is_file()
