"""Requests to stop a training early: its ranks finish the step, write a checkpoint and report."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trials.channels import Channel

STOP = "stop"
"""Name of the empty message by which the agent stops a training."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_requests(channel: Channel) -> Iterator[Callable[[], bool]]:
    """Provide a function that returns whether this rank was asked to stop, by the agent or by a signal.

    Schedulers send SIGTERM to every process of a job: it must not end a rank before the checkpoint.
    """
    received: list[int] = []
    before = {each: signal.signal(each, lambda number, _: received.append(number)) for each in _SIGNALS}
    try:
        yield lambda: bool(received) or channel.get(STOP) is not None
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
