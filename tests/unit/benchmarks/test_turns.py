"""Trainings in turns: one runs at a time, and each is timed by a clock of its own."""

import json
import sys
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks.full_training.following import CommandFailed
from benchmarks.full_training.turns import Command, in_turns

STEPS = """
import json, sys, time
for number in range(int(sys.argv[2])):
    time.sleep(0.02)
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps({"step": number, "samples": 2, "at": time.monotonic()}) + "\\n")
"""


def command(folder: Path, source: str, steps: int) -> Command:
    words = [sys.executable, "-c", source, str(folder / "progress"), str(steps)]
    return Command(words=words, folder=folder, progress=folder / "progress")


def test_one_training_runs_at_a_time_and_each_ends(tmp_path: Path) -> None:
    found = in_turns({name: command(tmp_path / name, STEPS, 40) for name in ("one", "other")}, seconds=0.2)
    assert [len(each.lines) for each in found.values()] == [40, 40]
    assert all(len(each.seconds) == 39 and each.samples_per_second > 0 for each in found.values())
    stamps = sorted((line["at"], name) for name, each in found.items() for line in each.lines)
    turns = [len(list(lines)) for _, lines in groupby(stamps, key=lambda stamp: stamp[1])]
    # Side by side, their lines would alternate one by one.
    assert len(turns) < 40


def test_a_training_that_fails_ends_all(tmp_path: Path) -> None:
    failing = command(tmp_path / "failing", f"{STEPS}\nsys.exit('no more')", 3)
    with pytest.raises(CommandFailed, match="no more"):
        in_turns({"good": command(tmp_path / "good", STEPS, 1000), "failing": failing}, seconds=0.1)
    lines = (tmp_path / "good" / "progress").read_text().splitlines()
    assert 0 < len([json.loads(line) for line in lines]) < 1000
