"""Commands that train, with the times at which the lines of their progress file arrive.

Times are measured here, and not taken from the program that trains.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.machine.conditions import MachineWatch
from autotune.machine.hardware import probe_hardware

_LOOK_SECONDS = 0.02
_MATRIX, _REPEATS = 768, 40


class CommandFailed(Exception):
    """A command ended with an error, or before it should."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of a progress file."""

    arrived: float
    """Seconds on this process's clock."""
    line: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that has ended."""

    code: int
    seconds: float
    steps: tuple[Step, ...]
    """Those that it added to its progress file."""
    printed: str
    """What it wrote to stdout."""
    disturbing_cores: float
    """Mean number of cores that other programs used meanwhile."""

    @property
    def document(self) -> Any:
        """The JSON object that the command printed; libraries may print lines before it."""
        _, _, rest = f"\n{self.printed}".partition("\n{")
        return json.loads(f"{{{rest}")


class Follower:
    """Read the lines that are added to a progress file, which may be replaced by one with fewer lines."""

    def __init__(self, path: Path) -> None:
        self.steps: list[Step] = []
        self._path = path
        # A line has the time of its step, so that a step that is trained again has another line.
        self._old = set(path.read_bytes().splitlines(keepends=True)) if path.exists() else set()
        self._inode, self._offset = 0, 0

    def look(self) -> None:
        if not self._path.exists():
            return
        now = time.perf_counter()
        with self._path.open("rb") as file:
            if (inode := os.fstat(file.fileno()).st_ino) != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if line not in self._old:
                    self._old.add(line)
                    with suppress(json.JSONDecodeError):  # a kill cut it off
                        self.steps.append(Step(arrived=now, line=json.loads(line)))


def run(
    command: Sequence[str | Path],
    folder: Path,
    progress: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a command to its end, with its output in `folder`; raise CommandFailed if it fails."""
    ended = watched(command, folder, progress, environment)
    if ended.code:
        log = (folder / "stderr.log").read_text()[-2000:]
        raise CommandFailed(f"{' '.join(map(str, command))} ended with exit code {ended.code}:\n{log}")
    return ended


def watched(
    command: Sequence[str | Path],
    folder: Path,
    progress: Path | None = None,
    environment: Mapping[str, str] | None = None,
    look: Callable[[subprocess.Popen[bytes], Sequence[Step]], None] | None = None,
) -> Ended:
    """Run a command to its end; `look` is called many times a second with its process and steps."""
    folder.mkdir(parents=True, exist_ok=True)
    follower = Follower(progress or folder / "none")
    began = time.perf_counter()
    with (
        (folder / "stdout.log").open("wb") as stdout,
        (folder / "stderr.log").open("ab") as stderr,
        MachineWatch(probe_hardware()) as watch,
    ):
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env={**os.environ, **(environment or {})})
        try:
            while process.poll() is None:
                follower.look()
                if look:
                    look(process, follower.steps)
                time.sleep(_LOOK_SECONDS)
        finally:
            process.kill()
            process.wait()
    follower.look()
    return Ended(
        code=process.returncode,
        seconds=time.perf_counter() - began,
        steps=tuple(follower.steps),
        printed=(folder / "stdout.log").read_text(),
        disturbing_cores=watch.conditions.disturbing_cpu,
    )


def autotune(*words: str | Path) -> list[str | Path]:
    return [sys.executable, "-m", "autotune", *words]


def training_samples_per_second(steps: Sequence[Step], dropped: int) -> float:
    """Return the speed over all steps but the first `dropped`, from the arrival of the last of these."""
    samples: int = sum(step.line["samples"] for step in steps[dropped:])
    return samples / (steps[-1].arrived - steps[dropped - 1].arrived)


def spread(values: Sequence[float]) -> Mapping[str, float]:
    """Return the median, the 10th and 90th percentile, and the standard deviation over the mean."""
    low, median, high = np.percentile(values, (10, 50, 90)).tolist()
    return {
        "median": median,
        "p10": low,
        "p90": high,
        "deviation": statistics.pstdev(values) / statistics.fmean(values),
    }


def wait_share(steps: Sequence[Step], dropped: int) -> float:
    """Return the share of the steps' time in which a rank waited for data."""
    counted = [step.line for step in steps[dropped:]]
    return float(sum(line["data_wait_seconds"] for line in counted) / sum(line["seconds"] for line in counted))


def machine_seconds() -> float:
    """Return the median time of a fixed computation on all cores, by which the machine's drift can be seen."""
    matrix = np.random.default_rng(0).random((_MATRIX, _MATRIX), dtype=np.float32)
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)
