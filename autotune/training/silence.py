"""Warnings when ranks of a training are stopped or make no progress."""

import logging
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import psutil

_log = logging.getLogger(__name__)

# Choices: looking at a rank costs a file of /proc, and a debugger stops a rank for a second now and then.
_LOOK_SECONDS = 1.0
_STOPPED_SECONDS = 5.0
_START_SECONDS = 300.0
"""Until the first step: imports, and large weights or checkpoints to read."""
# Choices: a first warning after twenty usual steps is no false alarm of a slow one, and short steps still get a minute,
# in which a checkpoint is written.
_LEAST_SECONDS = 60.0
_USUAL_STEPS = 20
_KEPT_STEPS = 1000
"""Last steps whose median is the usual one: it is computed once a second, and a training may have millions of steps."""
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """A rank at one moment."""

    state: str
    cpu_seconds: float


class Silence:
    """Warnings of ranks that are stopped for some seconds, and of steps that take much longer than usual."""

    def __init__(self, *, evaluates: bool = False) -> None:
        """Allow the first evaluation, with `evaluates`, as long as the start."""
        self._evaluation_seconds = _START_SECONDS / 2 if evaluates else 0.0
        self._steps: deque[float] = deque(maxlen=_KEPT_STEPS)
        self._looked = time.monotonic()
        self._last_step = datetime.now(UTC)
        self._silent_seconds = 0.0
        self._warned_seconds = 0.0
        self._stopped_seconds: dict[int, float] = {}
        self._first: tuple[_Look, ...] = ()

    def step(self, seconds: float) -> None:
        """Note a step that took `seconds`."""
        if self._warned_seconds:
            _log.warning("the training continues after %.0f s without a step", self._silent_seconds)
        self._steps.append(seconds)
        self._hear()

    def evaluation(self, seconds: float) -> None:
        """Note an evaluation that took `seconds`."""
        self._evaluation_seconds = seconds
        self._hear()

    def _hear(self) -> None:
        self._last_step, self._silent_seconds, self._warned_seconds, self._first = datetime.now(UTC), 0.0, 0.0, ()

    def look(self, pids: Sequence[int]) -> None:
        """Look at the ranks, given in order, at most once a second."""
        passed = time.monotonic() - self._looked
        if passed < _LOOK_SECONDS:
            return
        self._looked += passed
        passed = min(passed, 2 * _LOOK_SECONDS)  # this process may have been stopped itself, and the ranks with it
        self._silent_seconds += passed
        try:
            now = tuple(map(_look, pids))
        except psutil.Error:  # a rank has ended; the pool finds that out
            return
        self._first = self._first or now
        self._warn_of_stops(now, pids, passed)
        self._warn_of_silence(now)

    def _warn_of_stops(self, now: Sequence[_Look], pids: Sequence[int], passed: float) -> None:
        for rank, look in enumerate(now):
            before = self._stopped_seconds.pop(rank, 0.0)
            if look.state in _STOPPED:
                self._stopped_seconds[rank] = before + passed
                if before < _STOPPED_SECONDS <= before + passed:
                    _log.warning(
                        "rank %d has been stopped since %s; resume it with `kill -CONT %d`",
                        rank,
                        f"{datetime.fromtimestamp(time.time() - before - passed, UTC).astimezone():%H:%M:%S}",
                        pids[rank],
                    )
            elif before >= _STOPPED_SECONDS:
                _log.warning("rank %d continues; it was stopped for %.0f s", rank, before)

    def _warn_of_silence(self, now: Sequence[_Look]) -> None:
        """Warn once the allowed time is over, and again whenever it has doubled."""
        usual_seconds = statistics.median(self._steps) if self._steps else None
        allowed = (
            _START_SECONDS
            if usual_seconds is None
            else max(_LEAST_SECONDS, _USUAL_STEPS * usual_seconds, 2 * self._evaluation_seconds)
        )
        if self._silent_seconds < max(allowed, 2 * self._warned_seconds):
            return
        self._warned_seconds = self._silent_seconds
        states = []
        for rank, (first, look) in enumerate(zip(self._first, now, strict=True)):
            used = look.cpu_seconds - first.cpu_seconds
            if look.state in _STOPPED:
                states.append(f"rank {rank} is stopped")
            elif used > 0.05 * self._silent_seconds:
                states.append(f"rank {rank} computes ({used:.0f} s of CPU time)")
            else:
                states.append(f"rank {rank} waits ({look.state})")
        usual = "" if usual_seconds is None else f"; a step usually takes {usual_seconds:.1f} s"
        _log.warning(
            "no step since %s, for %.0f s%s%s",
            f"{self._last_step.astimezone():%H:%M:%S}",
            self._silent_seconds,
            usual,
            f": {', '.join(states)}" if states else "",  # ranks on other machines are not seen
        )


def _look(pid: int) -> _Look:
    process = psutil.Process(pid)
    times = process.cpu_times()
    return _Look(state=process.status(), cpu_seconds=times.user + times.system)
