"""Warnings when ranks of a training are stopped or make no progress."""

import logging
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import psutil

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_STOPPED_SECONDS = 5.0
_START_SECONDS = 300.0
"""Until the first step: imports, and large weights or checkpoints to read."""
_LEAST_SECONDS = 60.0
_USUAL_STEPS = 20
_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """A rank at one moment."""

    state: str
    cpu_seconds: float


class Silence:
    """Warn of ranks that are stopped for some seconds, and when a step takes much longer than usual."""

    def __init__(self) -> None:
        self._steps: list[float] = []
        self._looked = time.monotonic()
        self._last_step = datetime.now(UTC)
        self._silent_seconds = 0.0
        self._told_seconds = 0.0
        self._stopped_seconds: dict[int, float] = {}
        self._first: tuple[_Look, ...] = ()

    def step(self, seconds: float) -> None:
        """Note a step that took `seconds`."""
        if self._told_seconds:
            _log.warning("the training continues after %.0f s without a step", self._silent_seconds)
        self._steps.append(seconds)
        self._last_step, self._silent_seconds, self._told_seconds, self._first = datetime.now(UTC), 0.0, 0.0, ()

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
        self._tell_of_stops(now, pids, passed)
        self._tell_of_silence(now)

    def _tell_of_stops(self, now: Sequence[_Look], pids: Sequence[int], passed: float) -> None:
        for rank, look in enumerate(now):
            before = self._stopped_seconds.pop(rank, 0.0)
            if look.state in _STOPPED:
                self._stopped_seconds[rank] = before + passed
                if before < _STOPPED_SECONDS <= before + passed:
                    _log.warning(
                        "rank %d has been stopped since %s; resume it with `kill -CONT %d`",
                        rank,
                        _ago(before + passed),
                        pids[rank],
                    )
            elif before >= _STOPPED_SECONDS:
                _log.warning("rank %d continues; it was stopped for %.0f s", rank, before)

    def _tell_of_silence(self, now: Sequence[_Look]) -> None:
        """Warn once the allowed time is over, and again whenever it has doubled."""
        if self._silent_seconds < max(self._allowance(), 2 * self._told_seconds):
            return
        self._told_seconds = self._silent_seconds
        usual = f"; a step usually takes {statistics.median(self._steps):.1f} s" if self._steps else ""
        _log.warning(
            "no step since %s, for %.0f s%s: %s",
            f"{self._last_step.astimezone():%H:%M:%S}",
            self._silent_seconds,
            usual,
            ", ".join(
                f"rank {rank} {self._doing(first, look)}"
                for rank, (first, look) in enumerate(zip(self._first, now, strict=True))
            ),
        )

    def _allowance(self) -> float:
        if not self._steps:
            return _START_SECONDS
        return max(_LEAST_SECONDS, _USUAL_STEPS * statistics.median(self._steps))

    def _doing(self, first: _Look, now: _Look) -> str:
        if now.state in _STOPPED:
            return "is stopped"
        used = now.cpu_seconds - first.cpu_seconds
        return f"computes ({used:.0f} s of CPU time)" if used > 0.05 * self._silent_seconds else f"waits ({now.state})"


def _look(pid: int) -> _Look:
    process = psutil.Process(pid)
    times = process.cpu_times()
    return _Look(state=process.status(), cpu_seconds=times.user + times.system)


def _ago(seconds: float) -> str:
    return f"{datetime.fromtimestamp(time.time() - seconds, UTC).astimezone():%H:%M:%S}"
