"""Requests to stop a training early: its ranks finish the step, write a checkpoint and report."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def stop_path(folder: Path) -> Path:
    """Return the path of an empty file by which the agent stops the training whose request is in `folder`."""
    return folder / "stop"


@contextmanager
def stop_requests(folder: Path) -> Iterator[Callable[[], bool]]:
    """Provide a function that returns whether this rank was asked to stop, by the agent's file or by a signal.

    Schedulers send SIGTERM to every process of a job: it must not end a rank before the checkpoint.
    """
    received: list[int] = []
    before = {each: signal.signal(each, lambda number, _: received.append(number)) for each in _SIGNALS}
    try:
        yield lambda: bool(received) or stop_path(folder).exists()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
