"""One search: baselines, the plans predicted best, the sampler's proposals, and repeated runs of the finalists."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autotune.errors import NoFeasiblePlan, TrialsKeepFailing
from autotune.search.advisor import Advisor
from autotune.search.baselines import Baseline
from autotune.search.calibrated import CalibratedPredictor
from autotune.search.ledger import (
    BASELINES,
    CONFIRM,
    INHERITED,
    PREDICTED,
    REFERENCE,
    SAMPLED,
    Ledger,
    Listener,
    duration_seconds,
    ran,
)
from autotune.search.proposals import Judgement, Proposals, judge
from autotune.search.runner import Attempt, Runner, Steps
from autotune.search.space import Space
from autotune.search.winner import SMALL_LOSS, Field, field_of
from storage.records import FinishedTrial
from trials.job import SearchSection
from trials.outcome import Completed, Failed, OutOfMemory
from trials.plan import Plan

_log = logging.getLogger(__name__)
_PREDICTED_PLANS = 3
_NEARLY = 1.2
"""Plans of other pipeline degrees are tried first when they take at most so many times the best one's time."""
_AS_FAST = 1.03
"""The winner of an earlier search is tried when it is predicted to take at most so many times the best one's time."""
_FINALISTS = 3
_REFERENCE_EVERY = 8
"""Trials after which one plan is run again, to see the machine drift."""
_IDLE_SUGGESTIONS = 50
"""After so many suggestions in a row that need no run, the sampler has nothing new to say."""
_FAILURES_IN_A_ROW = 4
_LEAST_GAIN = 0.001
_GAIN_IN_NOISE = 0.1
"""An expected gain below this share of the error of one trial, or below _LEAST_GAIN, is not worth a trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Works through one study; what is answered already is not run again."""

    settings: SearchSection
    ledger: Ledger
    proposals: Proposals
    space: Space
    predictor: CalibratedPredictor
    advisor: Advisor
    runner: Runner
    listener: Listener
    clock: Callable[[], float] = time.monotonic

    def run(self, baselines: Iterable[Baseline], inherited: Sequence[Plan] = ()) -> Field:
        """Spends the budget, or less when no gain is left; all plans as they stand then.

        The plans predicted best and those of earlier searches come first: a search that is ended early has them.

        Raises TrialsKeepFailing when several trials in a row fail of anything but memory, and NoFeasiblePlan when no
        plan completed.
        """
        deadline = self._deadline()
        for trial in self.ledger.everything():
            self.advisor.learn(trial)
        seeds = [trial for trial in self.ledger.everything() if trial.role not in (CONFIRM, REFERENCE)]
        self.proposals.synchronize(seeds, self._judge)
        predicted = self.advisor.predicted(_NEARLY)[:_PREDICTED_PLANS]
        to_compare = list(baselines)
        for role, plans in ((PREDICTED, predicted), (INHERITED, self._inherited(inherited, predicted))):
            for plan in plans:
                if self._may_go_on(deadline, owed=self._owed(to_compare)):
                    self._seed(plan, role)
        for baseline in to_compare:
            if self._may_compare(baseline.role, deadline):
                self._seed(baseline.plan, baseline.role)
        self._sample(deadline)
        self._confirm(deadline)
        return self._field()

    # --- the budget ---

    def _deadline(self) -> float:
        """On the clock; what the study's trials took in earlier runs is spent."""
        spent = sum(duration_seconds(trial) for trial in self.ledger.trials)
        return self.clock() + self.settings.time_limit - spent

    def _may_compare(self, role: str, deadline: float) -> bool:
        """Each role's first plan always, for the winner is compared with it; more in a quarter of the trials."""
        return role not in self._roles() or (
            self._may_go_on(deadline) and self._compared() <= self.settings.trials // 4
        )

    def _owed(self, to_compare: Iterable[Baseline]) -> int:
        """Trials that the first plans of the roles will take."""
        return len({baseline.role for baseline in to_compare} - self._roles())

    def _roles(self) -> set[str]:
        return {trial.role for trial in self.ledger.everything()}

    def _compared(self) -> int:
        return sum(trial.role in BASELINES for trial in self._spent())

    def _spent(self) -> list[FinishedTrial]:
        """The trials that count against the budget."""
        return [trial for trial in self.ledger.trials if ran(trial) and trial.role != CONFIRM]

    def _may_go_on(self, deadline: float, owed: int = 0) -> bool:
        """Whether a trial is left beside those owed, and time for it and for the confirmation."""
        is_left = len(self._spent()) + owed < self.settings.trials
        return is_left and self._has_time(1 + _FINALISTS + len(BASELINES), deadline)

    def _has_time(self, runs: int, deadline: float) -> bool:
        durations = [duration_seconds(trial) for trial in self._spent() if isinstance(trial.result.outcome, Completed)]
        mean = sum(durations) / len(durations) if durations else 0.0
        return self.clock() + mean * runs < deadline

    def _is_worth(self, gain: float) -> bool:
        return gain > max(_LEAST_GAIN, _GAIN_IN_NOISE * self.advisor.surrogate.noise)

    # --- what is tried ---

    def _inherited(self, plans: Iterable[Plan], beside: Sequence[Plan]) -> list[Plan]:
        """Those that are predicted to be nearly as fast as the best."""
        seconds = min(map(self.predictor.epoch_seconds, beside), default=math.inf)
        return [plan for plan in plans if self.predictor.epoch_seconds(plan) <= _AS_FAST * seconds]

    def _sample(self, deadline: float) -> None:
        idle = 0
        while idle < _IDLE_SUGGESTIONS and self._may_go_on(deadline):
            proposal = self.advisor.propose()
            if proposal is None or not self._is_worth(proposal.gain):
                _log.info("no further gain is expected that a trial could show")
                return
            suggestion = self.proposals.suggest()
            plan = self.space.plan(suggestion.params)
            known = self.ledger.answer(plan)
            if known is not None:
                self.proposals.tell(suggestion, known.id, SAMPLED, self._judge(known))
                idle += 1
                continue
            answer = self._run(plan, SAMPLED, self.proposals.steps(suggestion))
            idle = 0 if ran(answer) else idle + 1
            self.proposals.tell(suggestion, answer.id, SAMPLED, self._judge(answer))
            self._refer(deadline)

    def _refer(self, deadline: float) -> None:
        """Runs one and the same plan again after some trials."""
        again = [number for number, trial in enumerate(self.ledger.trials) if trial.role == REFERENCE]
        since = self.ledger.trials[again[-1] + 1 if again else 0 :]
        reference = self.ledger.trials[again[0]].plan if again else self.advisor.best()
        if reference is not None and sum(map(ran, since)) >= _REFERENCE_EVERY and self._may_go_on(deadline):
            self._run(reference, REFERENCE)

    def _confirm(self, deadline: float) -> None:
        """Repeats the finalists in turns, so that a drift of the machine meets them all alike.

        Once with the baselines, and then those that may win, until one is sure or the time is spent.
        """
        field = self._field()
        if not field.standings:
            tried = len(self.ledger.trials)
            raise NoFeasiblePlan(f"none of the {tried} plans that were tried completed; raise hardware.memory_limit")
        for number in range(self.settings.confirm_rounds):
            field = self._field()
            for plan in field.contenders(_FINALISTS) if number else field.finalists(_FINALISTS):
                if self._confirmations(plan) <= number:
                    self._run(plan, CONFIRM)
            field = self._field()
            is_sure = not field.standings or field.verdict(field.repeated).loss <= SMALL_LOSS
            if is_sure or not self._has_time(_FINALISTS, deadline):
                return

    def _confirmations(self, plan: Plan) -> int:
        return sum(trial.role == CONFIRM and trial.plan == plan for trial in self.ledger.trials)

    def _field(self) -> Field:
        return field_of(self.ledger.everything(), self.advisor.surrogate)

    # --- trials ---

    def _seed(self, plan: Plan, role: str) -> None:
        known = self.ledger.answer(plan)
        if known is None:
            answer = self._run(plan, role)
            self.proposals.add(answer, self._judge(answer))
        elif known.study_id not in {trial.study_id for trial in self.ledger.trials}:
            self.listener(known, True)

    def _run(self, plan: Plan, role: str, steps: Steps | None = None) -> FinishedTrial:
        def attempt() -> Attempt:
            rejection = self.runner.rejection(plan)
            return Attempt(outcome=rejection) if rejection else self.runner.run(plan, steps)

        trial = self.ledger.record(plan, role, self.space.point(plan) or {}, attempt)
        self.advisor.learn(trial)
        self.listener(trial, False)
        self._stop_if_all_fail()
        return trial

    def _stop_if_all_fail(self) -> None:
        last = [trial.result.outcome for trial in self.ledger.trials if ran(trial)][-_FAILURES_IN_A_ROW:]
        causes = [outcome.cause for outcome in last if isinstance(outcome, Failed)]
        if len(causes) == _FAILURES_IN_A_ROW and not any(isinstance(cause, OutOfMemory) for cause in causes):
            raise TrialsKeepFailing(f"{len(causes)} trials in a row failed, the last with: {causes[-1]}")

    def _judge(self, trial: FinishedTrial) -> Judgement:
        return judge(trial.result.outcome, trial.result.epoch_seconds, self.predictor.epoch_seconds(trial.plan))
