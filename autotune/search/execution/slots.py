"""Slots in which trials run at the same time, each on devices of its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Event
from typing import Generic, Self, TypeVar

from autotune.search.execution.runner import Runner

T = TypeVar("T")
R = TypeVar("R")


class Cancelled(Exception):
    """The search has ended before the task."""


class TrialSlots(Generic[T, R]):
    """Slots for tasks, each on a free runner in a thread of its own. Leaving the context cancels what still runs."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        self._runners = tuple(runners)
        self._running: dict[Future[R], tuple[Runner, T]] = {}
        # Python cannot end a thread from outside: a task has to ask whether it shall end.
        self._cancelled = Event()
        self._threads = ThreadPoolExecutor(len(runners), thread_name_prefix="trial-slot")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._cancelled.set()
        # Waits for the tasks: they use the pools of ranks, which the caller closes next.
        self._threads.shutdown()

    @property
    def running(self) -> int:
        """Number of tasks that run, at most one for each runner."""
        return len(self._running)

    def start(self, key: T, task: Callable[[Runner, Callable[[], None]], R]) -> None:
        """Start the task on the first free runner; there must be one. `key` comes back with its result.

        The task has to call its second argument many times a second, which raises Cancelled once it shall end.
        """
        busy = [runner for runner, _ in self._running.values()]
        runner = next(one for one in self._runners if one not in busy)

        def check() -> None:
            if self._cancelled.is_set():
                raise Cancelled

        self._running[self._threads.submit(task, runner, check)] = runner, key

    def done(self, *, wait_for_one: bool) -> list[tuple[T, R]]:
        """Return the tasks that have ended with their results, and free their runners. Raise what a task raised."""
        ended = [future for future in self._running if future.done()]
        if not ended and wait_for_one and self._running:
            ended = list(wait(self._running, return_when=FIRST_COMPLETED).done)
        return [(self._running.pop(future)[1], future.result()) for future in ended]
