"""How a trial ends early: rank 0 tells each timed step in a file, and the agent says in another whether to go on."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trials import wire

_POLL_SECONDS = 0.002
"""All ranks stand still meanwhile, so rank 0 looks more often than the agent does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """What rank 0 tells of a step."""

    seconds: float
    """On its own clock; the times of all ranks are in their reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the agent makes of the steps so far."""

    go_on: bool


def tell(folder: Path, number: int, step: TimedStep) -> None:
    """Leaves timed step `number`, counted from 1, in the request's folder."""
    wire.write(_step_path(folder, number), step)


def await_verdict(folder: Path, number: int) -> Verdict:
    """Returns when the agent has answered step `number`. A rank whose agent is gone is killed: see `worker`."""
    while (verdict := wire.read(Verdict, _verdict_path(folder, number))) is None:
        time.sleep(_POLL_SECONDS)
    return verdict


class Listener:
    """The agent's side of one trial."""

    def __init__(self, folder: Path, on_step: Callable[[float], bool]) -> None:
        """`on_step` gets a step's seconds and returns whether to go on."""
        self._folder = folder
        self._on_step = on_step
        self._heard = 0

    def listen(self) -> None:
        """Answers every timed step that is new, in order."""
        while (step := wire.read(TimedStep, _step_path(self._folder, self._heard + 1))) is not None:
            self._heard += 1
            verdict = Verdict(go_on=self._on_step(step.seconds))
            wire.write(_verdict_path(self._folder, self._heard), verdict)


def _step_path(folder: Path, number: int) -> Path:
    return folder / f"step-{number}.json"


def _verdict_path(folder: Path, number: int) -> Path:
    return folder / f"verdict-{number}.json"
