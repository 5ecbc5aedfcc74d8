"""The result of running a plan, before it is recorded as a trial, and what is called while it runs."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import datetime

from storage.records import DisturbedRun, TrialResult
from trials.outcome import Outcome

StepCallback = Callable[[float], bool]
"""Called with the estimate of the epoch's seconds by each timed step; returns whether the trial shall go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Measurement or failure of a plan, from all its runs."""

    outcome: Outcome
    epoch_seconds: float | None = None
    epoch_seconds_error: float | None = None
    """Standard error, from the scatter of the timed steps around the prediction."""
    disturbance: str | None = None
    """What disturbed the run that counts, in words; the name under which it is stored."""
    energy_joules: float | None = None
    """Energy of all devices in the timed steps: the mean power from the end of the first to that of the last, times the
    seconds of all."""
    disturbed: tuple[DisturbedRun, ...] = ()
    """Runs before the one that counts, oldest first."""
    seconds: float | None = None
    """Duration of the trial with all its runs."""

    def result(self, trial_id: str, finished: datetime) -> TrialResult:
        """Return the result of a trial. Raise ValueError for numbers that cannot be stored."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return TrialResult(trial_id=trial_id, finished=finished, **values)
