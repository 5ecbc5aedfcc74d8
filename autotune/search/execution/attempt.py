"""What came of running a plan, before it belongs to a trial."""

from dataclasses import dataclass
from datetime import datetime

from storage.records import DisturbedRun, TrialResult
from trials.outcome import Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one run of a plan gave."""

    outcome: Outcome
    epoch_seconds: float | None = None
    epoch_seconds_error: float | None = None
    """Standard error, from the scatter of the timed steps around the prediction."""
    contamination: str | None = None
    """Why it should not be trusted, in words: what else the machine did meanwhile."""
    energy_joules: float | None = None
    """What all devices consumed, from the start of the trial to its end, with warm-up and all its runs."""
    disturbed: tuple[DisturbedRun, ...] = ()
    """Runs of the same trial before this one."""
    seconds: float | None = None
    """What the trial took, with all its runs."""

    def result(self, trial_id: str, finished: datetime) -> TrialResult:
        return TrialResult(
            trial_id=trial_id,
            outcome=self.outcome,
            epoch_seconds=self.epoch_seconds,
            epoch_seconds_error=self.epoch_seconds_error,
            contamination=self.contamination,
            energy_joules=self.energy_joules,
            disturbed=self.disturbed,
            seconds=self.seconds,
            finished=finished,
        )
