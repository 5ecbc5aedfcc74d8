"""Steering of a trial: rank 0 writes each timed step, and the agent answers whether to continue."""

import time
from dataclasses import dataclass

from trials import channels
from trials.channels import Channel

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


def step_name(number: int) -> str:
    """Return the name of the message of timed step `number`, counted from 1."""
    return f"step-{number}.json"


def verdict_name(number: int) -> str:
    """Return the name of the agent's answer to timed step `number`."""
    return f"verdict-{number}.json"


def await_verdict(channel: Channel, number: int) -> StepVerdict:
    """Wait for the answer to step `number` and return it. A rank whose agent has ended is killed: see `fork_server`."""
    while (verdict := channels.receive(StepVerdict, channel, verdict_name(number))) is None:
        time.sleep(_POLL_SECONDS)
    return verdict
