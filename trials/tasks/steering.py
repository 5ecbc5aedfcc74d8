"""Steering of a trial: rank 0 writes each timed step to a file, and the agent answers whether to continue."""

import time
from dataclasses import dataclass
from pathlib import Path

from trials import wire

_POLL_SECONDS = 0.002
"""All ranks wait meanwhile, so rank 0 polls more often than the agent does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """A step as rank 0 reports it."""

    seconds: float
    """Seconds on the clock of rank 0; the times of all ranks are in their reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """The agent's answer to a step."""

    go_on: bool


def step_path(folder: Path, number: int) -> Path:
    """Return where rank 0 writes timed step `number` of the request in `folder`, counted from 1."""
    return folder / f"step-{number}.json"


def verdict_path(folder: Path, number: int) -> Path:
    """Return where the agent answers timed step `number`."""
    return folder / f"verdict-{number}.json"


def await_verdict(folder: Path, number: int) -> StepVerdict:
    """Wait for the answer to step `number` and return it. A rank whose agent has ended is killed: see `fork_server`."""
    while (verdict := wire.read(StepVerdict, verdict_path(folder, number))) is None:
        time.sleep(_POLL_SECONDS)
    return verdict
