"""Trials at the same time, each on devices of its own."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Event
from types import TracebackType
from typing import Generic, Self, TypeVar

from autotune.search.execution.runner import Runner

T = TypeVar("T")
R = TypeVar("R")


class Cancelled(Exception):
    """A trial was given up with its search."""


class Lanes(Generic[T, R]):
    """Does each task with a runner that is free, in a thread. Leaving the context gives up what still runs."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        self._runners = tuple(runners)
        self._running: dict[Future[R], tuple[Runner, T]] = {}
        self._cancelled = Event()
        self._threads = ThreadPoolExecutor(len(runners), thread_name_prefix="lane")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cancelled.set()
        self._threads.shutdown()

    @property
    def are_busy(self) -> bool:
        """Whether any of them works."""
        return bool(self._running)

    @property
    def are_full(self) -> bool:
        """Whether all of them work."""
        return len(self._running) == len(self._runners)

    def start(self, what: T, task: Callable[[Runner, Callable[[], None]], R]) -> None:
        """On the first runner that is free; there must be one. The task calls its second argument many times a second.

        `what` comes back with the task's result.
        """
        busy = [runner for runner, _ in self._running.values()]
        runner = next(one for one in self._runners if one not in busy)
        self._running[self._threads.submit(task, runner, self._go_on)] = runner, what

    def done(self, *, wait_for_one: bool) -> list[tuple[T, R]]:
        """All that have ended, with their results; their runners are free again. Raises what a task raised."""
        ended = [future for future in self._running if future.done()]
        if not ended and wait_for_one and self._running:
            ended = list(wait(self._running, return_when=FIRST_COMPLETED).done)
        return [(self._running.pop(future)[1], future.result()) for future in ended]

    def _go_on(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled
