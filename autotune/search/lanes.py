"""Trials at the same time, each on devices of its own."""

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Event
from types import TracebackType
from typing import Self

from autotune.search.runner import Attempt, Runner, Steps
from trials.plan import Plan


class Cancelled(Exception):
    """A trial was given up with its search."""


class Lanes:
    """Runs each trial on a runner that is free, in a thread. Leaving the context gives up what still runs."""

    def __init__(self, runners: Sequence[Runner]) -> None:
        self._runners = tuple(runners)
        self._busy: dict[Future[Attempt], Runner] = {}
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
    def count(self) -> int:
        return len(self._runners)

    def start(self, plan: Plan, steps: Steps | None) -> Future[Attempt]:
        """On the first runner that is free; there must be one."""
        runner = next(one for one in self._runners if one not in self._busy.values())
        future = self._threads.submit(runner.run, plan, steps, self._go_on)
        self._busy[future] = runner
        return future

    def first_done(self) -> Future[Attempt]:
        """Waits until one of those that run has ended; its runner is free again."""
        done = wait(self._busy, return_when=FIRST_COMPLETED).done.pop()
        del self._busy[done]
        return done

    def _go_on(self) -> None:
        if self._cancelled.is_set():
            raise Cancelled
