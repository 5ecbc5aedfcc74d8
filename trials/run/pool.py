"""Rank processes that stay alive between requests, which saves each trial the imports and the start-up."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from trials.launchers import Launcher, RankGroup
from trials.outcome import Cause, Crash, OutOfMemory, Timeout
from trials.tasks.answer import Answer, FailureReport, Report
from trials.tasks.footprint import Footprint, leaks
from trials.tasks.request import Request, Trial
from trials.tasks.stop import Stop

_log = logging.getLogger(__name__)

# A choice: a start takes some seconds, next to fifty trials of as many each.
REQUESTS_PER_START: Mapping[Literal["warm", "fresh"], int] = {"warm": 50, "fresh": 1}
"""Requests per group of ranks, by `search.workers`. Warm ranks are limited too, for leaks that no footprint shows."""

_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.02, 0.25
# A choice: a trial seems 1 % longer at most to the agent, while ranks time their own steps.
_POLL_SHARE = 0.01
"""Of the time that ranks have been silent, by which an answer is seen too late."""
_START_SECONDS = 300.0
"""Limit until all ranks have begun with a request: new ones import torch first, which a cold disk or a busy processor
makes slow. A request with a longer timeout extends it to that."""
_SLOW_START = (
    "it did not begin within {seconds:g} s of its start; look at its log and at the machine's load, or raise "
    "search.trial_timeout above that"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The reports of all ranks, in order of rank."""

    reports: tuple[Report, ...]


class Pool(Protocol):
    """Ranks that serve one request after another: a `WarmPool`, or in tests a simulated machine."""

    def ask(
        self,
        request: Request,
        timeout_seconds: float,
        on_wait: Callable[[], None] = ...,
        on_step: Callable[[float], bool] | None = ...,
    ) -> Answers | Cause:
        """Return the ranks' reports, or the cause of the failure: see `WarmPool.ask`."""


class WarmPool:
    """Warm ranks, started for the first request, and replaced after a failure, a leak or many requests.

    Not for use by several threads. Leaving the context ends every rank.
    """

    def __init__(
        self,
        launcher: Launcher,
        requests_per_start: int = REQUESTS_PER_START["warm"],
        on_start: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """Replace the ranks after `requests_per_start` requests.

        `on_start` is called with False when new ranks start, and with True when all of them have begun with a request.
        """
        self._launcher = launcher
        self._requests_per_start = requests_per_start
        self._on_start = on_start
        self._ranks: RankGroup | None = None
        self._served = 0
        self._first: tuple[Footprint, ...] = ()

    def __enter__(self) -> "WarmPool":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in order of rank; empty before the ranks run, and for ranks on other machines."""
        return self._ranks.pids if self._ranks is not None else ()

    def ask(
        self,
        request: Request,
        timeout_seconds: float,
        on_wait: Callable[[], None] = lambda: None,
        on_step: Callable[[float], bool] | None = None,
        stops: Callable[[], Stop | None] = lambda: None,
    ) -> Answers | Cause:
        """Send the request to all ranks; return their reports, or the cause of the failure.

        `on_wait` is called many times a second while the ranks work. The timeout counts from when every rank has begun
        with the request, so it excludes the start-up; ranks that never begin are a Crash.

        With `on_step` a trial is steered: it is called after each timed step, in order, with the seconds of that step
        on rank 0, and all ranks wait until it returns. When it returns False, they report the steps until then. After
        the last step no rank waits, and what it returns is ignored.

        `stops` is called as often as `on_wait`: once it has returned when a training is to stop, the ranks are asked
        to, and once more if they are to stop at once after all.
        """
        try:
            ranks = self._running()
            ranks.send(_steered(request, on_step is not None))
            outcome = self._wait(ranks, timeout_seconds, on_wait, on_step or (lambda _: True), stops)
        except BaseException:  # Ctrl-C as well: ranks in the middle of a request can serve no other one
            self._end()
            raise
        if not isinstance(outcome, tuple):
            self._end()
            return outcome
        self._end_when_worn(tuple(answer.footprint for answer in outcome))
        return Answers(reports=tuple(answer.report for answer in outcome))

    def _running(self) -> RankGroup:
        """Return the ranks of the last request, or new ones."""
        # Warm ranks may have been killed between two requests.
        if self._ranks is not None and self._ranks.ended():
            self._end()
        if self._ranks is None:
            self._on_start(False)
            self._ranks = self._launcher.start()
        return self._ranks

    def _end(self) -> None:
        if self._ranks is not None:
            self._ranks.end()
        self._ranks, self._served, self._first = None, 0, ()

    def _end_when_worn(self, footprints: tuple[Footprint, ...]) -> None:
        """End ranks that have served enough requests, or hold more resources than after their first one."""
        self._served += 1
        self._first = self._first or footprints
        leaking = leaks(self._first, footprints)
        for rank, (before, now) in leaking.items():
            _log.warning(
                "rank %d leaks: %d descriptors, %d threads, %d MiB and %d MiB on its device after its first request, "
                "%d, %d, %d and %d after %d; the ranks are replaced",
                rank,
                *(before.descriptors, before.threads, before.resident_bytes >> 20, before.device_bytes >> 20),
                *(now.descriptors, now.threads, now.resident_bytes >> 20, now.device_bytes >> 20),
                self._served,
            )
        if leaking or self._served == self._requests_per_start:
            self._end()

    def _wait(
        self,
        ranks: RankGroup,
        timeout_seconds: float,
        on_wait: Callable[[], None],
        on_step: Callable[[float], bool],
        stops: Callable[[], Stop | None],
    ) -> tuple[Answer, ...] | Cause:
        world_size, start_seconds = self._launcher.world_size, max(_START_SECONDS, timeout_seconds)
        has_begun, asked, heard = False, set[Stop](), time.monotonic()
        deadline = heard + start_seconds
        while time.monotonic() < deadline:
            answers = ranks.answers()
            # Read after the answers, so that the begin and the last step are reported before they are returned.
            if not has_begun and len(ranks.begun()) == world_size:
                has_begun, heard = True, time.monotonic()
                deadline = heard + timeout_seconds
                self._on_start(True)
            while (seconds := ranks.next_step()) is not None:
                ranks.decide(go_on=on_step(seconds))
                heard = time.monotonic()
            if any(isinstance(answer.report, FailureReport) for answer in answers.values()) or ranks.ended():
                return _cause(ranks, world_size)
            if len(answers) == world_size:
                return tuple(answers[rank] for rank in range(world_size))
            on_wait()
            if (stop := stops()) is not None and not asked & {stop, Stop.NOW}:
                ranks.stop(stop)
                asked.add(stop)
            time.sleep(_pause(time.monotonic() - heard))
        if not has_begun:
            slow = min(set(range(world_size)) - ranks.begun())
            return Crash(rank=slow, detail=_SLOW_START.format(seconds=start_seconds))
        return Timeout(seconds=timeout_seconds)


def _pause(seconds: float) -> float:
    """Return for how long not to look after the ranks, from which nothing has come for some seconds.

    Looks every `_POLL_SECONDS` would take 2 % of a core through a whole training.
    """
    return min(max(_POLL_SECONDS, _POLL_SHARE * seconds), _LONGEST_POLL_SECONDS)


def _cause(ranks: RankGroup, world_size: int) -> Cause:
    """Return the first cause: when a rank ends, its neighbours fail soon after, because they need it.

    The first to report is not always the cause, so wait until all have reported or ended, or the aftermath is over.
    """
    deadline = time.monotonic() + ranks.aftermath_seconds
    while True:
        ended = ranks.ended()
        answers = ranks.answers()  # after it, so that a rank that has ended has its report among them
        causes = [each.report.cause for each in answers.values() if isinstance(each.report, FailureReport)]
        for cause in causes:
            # A rank that ran out of memory is the cause: its neighbours fail because it is gone.
            if isinstance(cause, OutOfMemory):
                return cause
        if len(answers.keys() | ended.keys()) == world_size or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    reported = {cause.rank for cause in causes}
    # A rank that died without a word comes first: what its neighbours report is the consequence.
    return next((crash for rank, crash in ended.items() if rank not in reported), None) or causes[0]


def _steered(request: Request, steered: bool) -> Request:
    """Return the request with its trial marked as `steered`: only then do ranks wait for verdicts."""
    task = request.task
    return replace(request, task=replace(task, steered=steered)) if isinstance(task, Trial) else request
