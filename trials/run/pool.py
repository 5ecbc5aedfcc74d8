"""Rank processes that stay alive between requests, so that a trial does not pay for imports and start-up."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Literal
from uuid import uuid4

from trials.outcome import Cause, Crash, OutOfMemory, Timeout
from trials.run.ranks import Command, Ranks
from trials.tasks.answer import Answer, FailureReport, Report, begun_path, read_report, report_path
from trials.tasks.footprint import Footprint, leaks
from trials.tasks.request import Request, Trial, write_request
from trials.tasks.steering import Listener

_log = logging.getLogger(__name__)

REQUESTS_PER_START: Mapping[Literal["warm", "fresh"], int] = {"warm": 50, "fresh": 1}
"""How many requests ranks serve, by `search.workers`. Warm ones end some time, for what no count of theirs shows."""

_POLL_SECONDS = 0.02
_START_SECONDS = 300.0
"""In which ranks have to begin with a request: fresh ones import torch first, which a cold disk or a full processor
makes slow. A request with more time than this gives the start as much."""
_SLOW_START = (
    "it did not begin within {seconds:g} s of its start; look at its log and at the machine's load, or raise "
    "search.trial_timeout above that"
)
_AFTERMATH_SECONDS = 1.0
"""How long other reports are awaited once a rank has failed: the first to report is not always the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What all ranks reported, in order of rank."""

    reports: tuple[Report, ...]


class WarmPool:
    """Serves requests on ranks that are started on the first one, and again after a failure or when they are worn out.

    Not for use by several threads. Leaving the context ends every rank.
    """

    def __init__(
        self, commands: Sequence[Command], folder: Path, requests_per_start: int = REQUESTS_PER_START["warm"]
    ) -> None:
        """`folder` takes a numbered folder for each request, with the ranks' reports and errors, and their logs.

        After `requests_per_start` requests the ranks are ended; the next request starts new ones.
        """
        self._commands = tuple(commands)
        self._folder = folder
        self._requests_per_start = requests_per_start
        self._ranks: Ranks | None = None
        self._served = 0
        self._first: tuple[Footprint, ...] = ()
        self._numbers = count(1)

    def __enter__(self) -> "WarmPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the ranks in order; none before the first request."""
        return self._ranks.pids if self._ranks is not None else ()

    def ask(
        self,
        request: Request,
        timeout_seconds: float,
        on_wait: Callable[[], None] = lambda: None,
        on_step: Callable[[float], bool] | None = None,
    ) -> Answers | Cause:
        """Gives the request to all ranks and waits for their reports, or for the reason why there are none.

        `on_wait` is called between looks, many times a second. The time starts when every rank has begun with the
        request, so it includes no start-up; ranks that do not begin at all are a Crash.

        With `on_step` a trial is steered: it is called after each timed step, in order, with the seconds of that step
        on rank 0, and all ranks stand still until it returns. False is enough: they report the steps until then. After
        the last step nobody waits for it, nor for what it returns.
        """
        folder = self._folder / f"request-{next(self._numbers)}-{uuid4().hex[:8]}"
        write_request(folder, _steered(request, on_step is not None))
        listen = Listener(folder, on_step).listen if on_step else lambda: None
        try:
            self._send(str(folder))
            outcome = self._wait(folder, timeout_seconds, listen, on_wait)
        except BaseException:
            self._end()
            raise
        if not isinstance(outcome, tuple):
            self._end()
            return outcome
        self._end_when_worn(tuple(answer.footprint for answer in outcome))
        return Answers(reports=tuple(answer.report for answer in outcome))

    def _send(self, line: str) -> None:
        if self._ranks is not None and self._ranks.dead():
            self._end()
        if self._ranks is None:
            self._ranks = Ranks(self._commands, self._folder / "logs")
        with suppress(BrokenPipeError):  # a rank that died just now is found dead while waiting
            self._ranks.send(line)

    def _end(self) -> None:
        if self._ranks is not None:
            self._ranks.end()
        self._ranks, self._served, self._first = None, 0, ()

    def _end_when_worn(self, footprints: tuple[Footprint, ...]) -> None:
        """Ends ranks that have served enough requests, or hold on to more than after their first one."""
        self._served += 1
        self._first = self._first or footprints
        leaking = leaks(self._first, footprints)
        for rank, (before, now) in leaking.items():
            _log.warning(
                "rank %d leaks: %d descriptors, %d threads, %d MiB and %d MiB on its device after its first request, "
                "%d, %d, %d and %d after %d; new ranks take over",
                rank,
                *(before.descriptors, before.threads, before.resident_bytes >> 20, before.device_bytes >> 20),
                *(now.descriptors, now.threads, now.resident_bytes >> 20, now.device_bytes >> 20),
                self._served,
            )
        if leaking or self._served == self._requests_per_start:
            self._end()

    def _wait(
        self, folder: Path, timeout_seconds: float, listen: Callable[[], None], on_wait: Callable[[], None]
    ) -> tuple[Answer, ...] | Cause:
        start_seconds = max(_START_SECONDS, timeout_seconds)
        waiting = list(range(len(self._commands)))
        deadline = time.monotonic() + start_seconds
        while time.monotonic() < deadline:
            if waiting:
                waiting = [rank for rank in waiting if not begun_path(folder, rank).exists()]
                deadline = deadline if waiting else time.monotonic() + timeout_seconds
            answers = [read_report(folder, rank) for rank in range(len(self._commands))]
            listen()  # after the reports are read, so that the last step is heard before they are handed on
            done = tuple(answer for answer in answers if answer is not None)
            if any(isinstance(answer.report, FailureReport) for answer in done) or self._died():
                time.sleep(_AFTERMATH_SECONDS)
                return self._why(folder)
            if len(done) == len(answers):
                return done
            on_wait()
            time.sleep(_POLL_SECONDS)
        if waiting:
            return Crash(rank=waiting[0], detail=_SLOW_START.format(seconds=start_seconds))
        return Timeout(seconds=timeout_seconds)

    def _died(self) -> dict[int, int]:
        return self._ranks.dead() if self._ranks is not None else {}

    def _why(self, folder: Path) -> Cause:
        """The first cause: when a rank goes, its neighbours fail soon after, for want of it."""
        causes = []
        for rank in range(len(self._commands)):
            answer = read_report(folder, rank)
            if answer is not None and isinstance(answer.report, FailureReport):
                causes.append((report_path(folder, rank).stat().st_mtime_ns, answer.report.cause))
        for _, cause in causes:
            if isinstance(cause, OutOfMemory):
                return cause
        reported = {cause.rank for _, cause in causes}
        for rank, code in self._died().items():
            if rank not in reported:
                return Crash(rank=rank, detail=_describe_exit(code))
        return min(causes, key=lambda entry: entry[0])[1]


def _steered(request: Request, steered: bool) -> Request:
    """Ranks wait for a verdict when somebody gives one, and never else."""
    task = request.task
    return replace(request, task=replace(task, steered=steered)) if isinstance(task, Trial) else request


def _describe_exit(code: int) -> str:
    return f"the process was ended by signal {-code}" if code < 0 else f"the process ended with exit code {code}"
