"""State of a search for its display."""

from collections import Counter
from collections.abc import Sequence

from autotune.events import BestSoFar, Event, Gain, Phase, PhaseBegan, SearchStatus, TrialBegan, TrialEnded
from autotune.plan_text import plan_text, trial_line
from autotune.search.roles import Role
from storage.records import FinishedTrial, RunningTrial
from trials.outcome import Completed, Failed
from trials.units import duration_text, number_of


class Searching:
    """Trials of a search and its repeats."""

    share: float | None = None
    """A search may end at any trial."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[RunningTrial, float]] = {}
        """Trials by id, with the times at which they began."""
        self._status: SearchStatus | None = None
        self._heard = 0.0
        """Time of the status."""
        self._phase = Phase.SEARCH
        self._epoch_samples = 0
        self._outcomes: Counter[str] = Counter()
        self._disturbed = 0
        self._failure = ""

    def hear(self, event: Event, now: float) -> str:
        match event:
            case PhaseBegan(phase=phase, epoch_samples=samples):
                self._phase, self._epoch_samples = phase, samples or self._epoch_samples
            case TrialBegan(trial=trial):
                self._running[trial.id] = trial, now
            case TrialEnded(trial=ended, is_known=is_known):
                self._running.pop(ended.id, None)
                if not is_known:
                    self._count(ended)
                return trial_line(ended, self._epoch_samples, known=is_known)
            case SearchStatus():
                self._status, self._heard = event, now
            case _:
                pass
        return ""

    def headline(self, now: float) -> str:
        is_search = self._phase == Phase.SEARCH
        if self._status is None:
            return "solving for the plans to try first" if is_search else ""
        # A status comes with each trial, and the time goes on in between.
        left = self._status.seconds_left - (now - self._heard)
        over = f"the time is used up{'' if is_search else self._overrun}"
        parts = [
            f"{self._status.spent} of at most {number_of(self._status.trials, 'trial')}" if is_search else "",
            *(
                f"trial {trial.number} ({trial.plan.id}) for {duration_text(now - began)}"
                for trial, began in self._running.values()
            ),
            "choosing the next plan" if is_search and not self._running else "",
            f"at most {duration_text(left)} left" if left > 0 else over,
        ]
        return ", ".join(filter(None, parts))

    @property
    def _overrun(self) -> str:
        """Why repeats go on after the time limit, in words."""
        if any(trial.role == Role.FINAL for trial, _ in self._running.values()):
            return ", but the longer run of the winner is completed"
        # The first round is, but for baselines that are too slow to win.
        return ", but every plan that may win is repeated once"

    def rows(self, _: float) -> Sequence[tuple[str, str]]:
        rows = [
            ("now", f"trial {trial.number}, {trial.role}, {trial.plan.id}: {plan_text(trial.plan)}")
            for trial, _ in self._running.values()
        ]
        if self._status is not None and self._status.best is not None:
            rows.append(("best", _best_text(self._status.best)))
        if self._outcomes:
            counts = ", ".join(f"{count} {name}" for name, count in self._outcomes.items())
            disturbed = f"; {self._disturbed} disturbed by other load" if self._disturbed else ""
            rows.append(("so far", f"{counts}{disturbed}{self._failure}"))
        return rows

    def _count(self, trial: FinishedTrial) -> None:
        outcome = trial.result.outcome
        is_shortened = isinstance(outcome, Completed) and outcome.shortened
        self._outcomes["ended early" if is_shortened else outcome.kind] += 1
        self._disturbed += trial.result.is_disturbed
        if isinstance(outcome, Failed):
            self._failure = f"; last failure: {outcome.cause}"


def _gain_text(gain: Gain) -> str:
    if not gain.error:
        return f"it is {gain.role}"
    if gain.gain < 1:
        return f"but {gain.role} is {1 / gain.gain:.2f} times as fast"
    return f"{gain.gain:.2f} +- {gain.error:.2f} times as fast as {gain.role}"


def _best_text(best: BestSoFar) -> str:
    compared = ", ".join(map(_gain_text, best.gains)) or "no baseline has completed yet"
    return f"{best.plan.id}, epoch {best.epoch_seconds:.1f} +- {best.epoch_seconds_error:.1f} s: {compared}"
