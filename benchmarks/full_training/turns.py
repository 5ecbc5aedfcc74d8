"""Several trainings at once, of which one runs at a time, in turns of seconds.

The speed of a shared machine changes by a third within a minute. Turns that are shorter than that hit all alike.
"""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from signal import SIGCONT, SIGSTOP, Signals

import psutil

from benchmarks.full_training.following import CommandFailed, Follower

TURN_SECONDS = 2.0
_LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that trains, and the file to which it adds a line after each step."""

    words: Sequence[str | Path]
    folder: Path
    """Folder of its output."""
    progress: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class _Training:
    """A started command, which stands still but for its turns. Its clock runs in these alone."""

    def __init__(self, command: Command, files: ExitStack) -> None:
        self.command = command
        self.clock = 0.0
        self.arrived: list[float] = []
        """Its clock at each step that it has ended."""
        self.follower = Follower(command.progress)
        command.folder.mkdir(parents=True, exist_ok=True)
        stdout, stderr = (files.enter_context((command.folder / f"{n}.log").open("wb")) for n in ("stdout", "stderr"))
        environment = {**os.environ, **command.environment}
        self._process = subprocess.Popen(command.words, stdout=stdout, stderr=stderr, env=environment)
        self._processes: list[psutil.Process] = []

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def turn(self, seconds: float, steps: int | None = None) -> None:
        """Run it for `seconds`, or until it has completed `steps` steps."""
        self._signal(SIGCONT)
        began = last = time.perf_counter()
        while not self.has_ended and last - began < seconds and (steps is None or len(self.arrived) < steps):
            time.sleep(_LOOK_SECONDS)
            now = time.perf_counter()
            self.clock += now - last
            last = now
            self.follower.look()
            self.arrived += [self.clock] * (len(self.follower.steps) - len(self.arrived))
        self._signal(SIGSTOP)

    def kill(self) -> None:
        self.look_up()
        self._signal(Signals.SIGKILL)
        self._process.wait()

    def check(self) -> None:
        """Raise CommandFailed if it has failed."""
        if self._process.poll():
            log = (self.command.folder / "stderr.log").read_text()[-2000:]
            words = " ".join(map(str, self.command.words))
            raise CommandFailed(f"{words} ended with exit code {self._process.returncode}:\n{log}")

    def look_up(self) -> None:
        """Look up its processes, while it stands still or starts: a search among all takes too long for a turn."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self._process.pid)
            self._processes = [process, *process.children(recursive=True)]

    def _signal(self, sent: Signals) -> None:
        for each in self._processes:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A training that has ended."""

    seconds: tuple[float, ...]
    """Of each step after the first, on a clock that runs in its turns alone."""
    lines: tuple[Mapping[str, float], ...]
    """Of each step."""

    @property
    def samples_per_second(self) -> float:
        """Over all steps but the first."""
        return sum(line["samples"] for line in self.lines[1:]) / sum(self.seconds)


def in_turns(commands: Mapping[str, Command], seconds: float = TURN_SECONDS) -> dict[str, Timed]:
    """Run commands to their ends, one at a time, each for a turn of `seconds`; raise CommandFailed if one fails.

    Each first runs to the end of its first step, so that turns hold no starts.
    """
    started: dict[str, _Training] = {}
    with ExitStack() as files:
        try:
            for name, command in commands.items():
                started[name] = _Training(command, files)
                started[name].turn(float("inf"), steps=1)
                started[name].look_up()
                started[name].turn(0.0)
                started[name].check()
            while running := [each for each in started.values() if not each.has_ended]:
                for each in running:
                    each.turn(seconds)
                    each.check()
        finally:
            for each in started.values():
                each.kill()
    return {name: _timed(each) for name, each in started.items()}


def _timed(training: _Training) -> Timed:
    return Timed(
        seconds=tuple(later - earlier for earlier, later in pairwise(training.arrived)),
        lines=tuple(step.line for step in training.follower.steps),
    )
