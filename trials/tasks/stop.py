"""Requests to stop a training early: at once, or at its next checkpoint."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from trials.channels import Channel

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop(StrEnum):
    """When to stop a training. The values name the empty messages by which the agent asks for it."""

    NOW = "stop"
    """After the current step, with a checkpoint."""
    AT_CHECKPOINT = "stop-at-checkpoint"
    """After the next step whose checkpoint is due."""


@contextmanager
def stop_requests(channel: Channel) -> Iterator[Callable[[], Stop | None]]:
    """Provide a function that returns whether this rank was asked to stop, by the agent or by a signal, and when.

    Schedulers send SIGTERM to every process of a job: it must not end a rank before the checkpoint.
    """
    received: list[int] = []
    before = {each: signal.signal(each, lambda number, _: received.append(number)) for each in _SIGNALS}

    def asked() -> Stop | None:
        if received:
            return Stop.NOW
        written = channel.written(Stop)
        return next((each for each in Stop if each in written), None)

    try:
        yield asked
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
