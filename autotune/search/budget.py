"""What a search may still spend: trials, time, and hours of devices."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from autotune.search.execution.ledger import Ledger, busy_seconds, duration_seconds, ran
from autotune.search.roles import BASELINES, CONFIRMATION, Role
from autotune.search.winner import FINALISTS
from storage.records import FinishedTrial, TrialRecord
from trials.job import SearchSection
from trials.outcome import Completed
from trials.plan import Plan
from trials.units import duration_text, number_of

_log = logging.getLogger(__name__)

# A choice: more steps make the speed that is promised surer, but take their time from trials.
_FINAL_SHARE = 0.1
"""Share of the time that is kept for the long measurement of the winner."""
_SHARE_OF_TIMEOUT = 0.5
"""Share of the timeout of a trial that this measurement may take; building the model counts, too."""


@dataclass(slots=True, kw_only=True)
class Budget:
    """Budget of one study, which its agents share."""

    settings: SearchSection
    ledger: Ledger
    clock: Callable[[], float]
    may_win: Callable[[Plan], bool] = lambda _: True
    """Whether a plan may win; others are repeated only if time is left."""
    _deadline: float = field(init=False)
    """On the clock. The time of the study's trials in earlier, interrupted runs is spent."""

    def __post_init__(self) -> None:
        self._deadline = self.clock() + self.settings.time_limit - busy_seconds(self.ledger.trials)

    @property
    def spent(self) -> list[TrialRecord]:
        """Trials that count against `search.trials`, running ones included: not rejected plans, not confirmations."""
        trials = (*filter(ran, self.ledger.trials), *self.ledger.open)
        return [trial for trial in trials if trial.role not in CONFIRMATION]

    @property
    def seconds_left(self) -> float:
        """Seconds until the time limit; negative once it has passed."""
        return self._deadline - self.clock()

    def allows_trial(self, reserved: int = 0) -> bool:
        """Return whether one more trial is left besides the `reserved` ones, with time for it and the confirmation."""
        is_left = self.left(reserved) > 0 and not self.ledger.is_closing
        return is_left and self._affords([*(1 + FINALISTS) * [None], *self._repeated_baselines()])

    def left(self, reserved: int = 0) -> int:
        """Return the trials that are left besides the `reserved` ones."""
        return self.settings.trials - len(self.spent) - reserved

    def why_none(self, reserved: int = 0) -> str:
        """Return why no trial is left besides the `reserved` ones, in words; nothing where one is."""
        if self.ledger.is_closing:
            return "Another agent is repeating the finalists"
        if self.left(reserved) <= 0:
            spent = number_of(self.settings.trials, "trial of search.trials is", "trials of search.trials are")
            return f"The {spent} used up"
        if not self.allows_trial(reserved):
            return "Too little is left of search.time_limit or search.device_hours for more than the finalists' repeats"
        return ""

    def has_time(self, runs: int) -> bool:
        """Return whether the time and device-hour budgets allow `runs` more trials, after those that run now."""
        return self._affords(runs * [None])

    def allows_repeat(self, plan: Plan) -> bool:
        """Return whether the time and device-hour budgets allow one more run of a plan that completed."""
        completed = (trial for trial in self.ledger.everything() if isinstance(trial.result.outcome, Completed))
        seconds = min(duration_seconds(trial) for trial in completed if trial.plan == plan)
        return self._allow(seconds, plan.layout.world_size * seconds)

    def _repeated_baselines(self) -> list[Role]:
        """Return the fastest baseline of those that may win; before any has run, each kind.

        Repeats of others serve the error of their gains alone, and are made if time is left.
        """
        if all(trial.role not in BASELINES for trial in self.ledger.trials):
            return [*BASELINES]
        of_baselines = (trial for trial in self.ledger.trials if trial.role in BASELINES and self.may_win(trial.plan))
        measured = [(each.result.epoch_seconds, each.role) for each in of_baselines if each.result.epoch_seconds]
        return [Role(min(measured)[1])] if measured else []

    def _affords(self, runs: Sequence[Role | None]) -> bool:
        """Return whether the budgets allow trials of these baselines; each None stands for a trial of another plan."""
        counted = (trial for trial in self.ledger.trials if trial.role not in CONFIRMATION)
        completed = sorted((t for t in counted if isinstance(t.result.outcome, Completed)), key=duration_seconds)
        seconds = device_seconds = 0.0
        if completed:
            shortest = {trial.role: trial for trial in reversed(completed)}
            # The median of a few trials leaves out the first one, whose ranks had to start.
            typical = completed[(len(completed) - 1) // 2]
            expected = [shortest.get(role, typical) if role else typical for role in runs]
            seconds = sum(map(duration_seconds, expected))
            device_seconds = sum(map(_device_seconds, (*expected, *(typical for _ in self.ledger.open))))
        return self._allow(seconds, device_seconds)

    def _allow(self, seconds: float, device_seconds: float) -> bool:
        return seconds < self.seconds_left - self._kept_for_final and device_seconds < self._device_seconds_left

    def fitting(self, seconds: float, baselines_seconds: float, groups: int, devices: int) -> int:
        """Return how many trials of `seconds` each fit, besides the baselines and one repeat of each finalist.

        `groups` of `devices` each run trials at the same time, and repeats are run on one of them.
        """
        left = min(self.seconds_left - self._kept_for_final, self._device_seconds_left / (devices * groups))
        return max(0, int((groups * (left - FINALISTS * seconds) - baselines_seconds) / seconds))

    def costs_text(
        self, seconds: float, of_baselines: Sequence[float], always: float, groups: int, devices: int
    ) -> str:
        """Return what a search costs, in words; warn where no trial fits besides the baselines, or none can end.

        A trial takes `seconds`, the baselines that no limit leaves out `always` seconds, with their repeats. There are
        `groups` of `devices`, as for `fitting`.
        """
        fit = self.fitting(seconds, sum(of_baselines), groups, devices)
        more = max(0, min(fit, self.settings.trials - len(self.spent) - len(of_baselines)))
        text = f"A trial of the plan predicted best takes about {seconds:.1f} s"
        if always > self.settings.time_limit:
            text += (
                f"; the baselines that always run take about {duration_text(always)} with their repeats, longer than "
                "search.time_limit"
            )
        else:
            compared = f", {number_of(len(of_baselines), 'baseline')} {sum(of_baselines):.1f} s" if of_baselines else ""
            text += f"{compared}; about {number_of(more, 'more trial')}"
        limit = min(groups * devices * self.settings.time_limit / 3600, self.settings.device_hours or math.inf)
        expected = devices * self._expected_seconds(seconds, more, sum(of_baselines)) / 3600
        if seconds > self.settings.trial_timeout:
            _log.warning(
                "a trial is predicted to take %s, longer than search.trial_timeout, and would be ended; raise that "
                "timeout, or lower search.timed_steps",
                duration_text(seconds),
            )
        if not fit:
            limits = "search.time_limit" + " and search.device_hours" * (self.settings.device_hours is not None)
            _log.warning(
                "the limits of the search leave no time for more than the baselines; raise %s, or lower "
                "search.timed_steps",
                limits,
            )
        hours = max(min(limit, expected), devices * always / 3600)
        return f"{text}; about {hours:.2g} device-hours in all"

    def _expected_seconds(self, seconds: float, more: int, baselines_seconds: float) -> float:
        """Return the seconds of the baselines, of `more` trials of `seconds` each, and of all repeats there may be."""
        settings = self.settings
        steps, final_steps = (settings.warmup_steps + each for each in (settings.timed_steps, settings.final_steps))
        final = min(seconds * final_steps / steps, _SHARE_OF_TIMEOUT * settings.trial_timeout)
        repeats = FINALISTS * settings.confirm_rounds * seconds + baselines_seconds
        return more * seconds + baselines_seconds + repeats + (final if final_steps > steps else 0.0)

    def seconds_for_final(self, devices: int) -> float:
        """Return how long the long measurement of the winner on some devices may take."""
        timeout = _SHARE_OF_TIMEOUT * self.settings.trial_timeout
        return min(self.seconds_left, self._device_seconds_left / devices, timeout)

    @property
    def _kept_for_final(self) -> float:
        return _FINAL_SHARE * self.settings.time_limit if self.settings.final_steps > self.settings.timed_steps else 0.0

    @property
    def _device_seconds_left(self) -> float:
        hours = math.inf if self.settings.device_hours is None else self.settings.device_hours
        return 3600 * hours - sum(map(_device_seconds, self.ledger.trials))


def _device_seconds(trial: FinishedTrial) -> float:
    """Return the seconds of the trial, times the number of its devices."""
    return trial.plan.layout.world_size * duration_seconds(trial)
