"""How a trial ends early: rank 0 tells each timed step in a file, and the agent says in another whether to go on."""

import time
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
    """Return when the agent has answered step `number`. A rank whose agent is gone is killed: see `fork_server`."""
    while (verdict := wire.read(Verdict, _verdict_path(folder, number))) is None:
        time.sleep(_POLL_SECONDS)
    return verdict


def read_step(folder: Path, number: int) -> TimedStep | None:
    """Timed step `number`, counted from 1; None until rank 0 has left it."""
    return wire.read(TimedStep, _step_path(folder, number))


def write_verdict(folder: Path, number: int, verdict: Verdict) -> None:
    """Answer step `number`."""
    wire.write(_verdict_path(folder, number), verdict)


def _step_path(folder: Path, number: int) -> Path:
    return folder / f"step-{number}.json"


def _verdict_path(folder: Path, number: int) -> Path:
    return folder / f"verdict-{number}.json"
