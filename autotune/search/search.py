"""One search: baselines, the plans predicted best, the sampler's proposals, and repeated runs of the finalists."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import NoFeasiblePlan, TrialsKeepFailing
from autotune.search.baselines import Baseline
from autotune.search.calibrated import CalibratedPredictor
from autotune.search.ledger import BASELINES, CONFIRM, PREDICTED, SAMPLED, Ledger, Listener, duration_seconds, ran
from autotune.search.proposals import Judgement, Proposals, judge
from autotune.search.runner import Attempt, Runner
from autotune.search.space import Space
from autotune.search.winner import Standing, finalists, standings
from storage.records import FinishedTrial
from trials.job import SearchSection
from trials.outcome import Completed, Failed, OutOfMemory
from trials.plan import Plan

_PREDICTED_PLANS = 4
_FINALISTS = 2
_IDLE_SUGGESTIONS = 50
"""After so many suggestions in a row that need no run, the sampler has nothing new to say."""
_FAILURES_IN_A_ROW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Works through one study; what is answered already is not run again."""

    settings: SearchSection
    ledger: Ledger
    proposals: Proposals
    space: Space
    predictor: CalibratedPredictor
    runner: Runner
    listener: Listener

    def run(self, baselines: Iterable[Baseline]) -> None:
        """Spends the budget. Raises TrialsKeepFailing when several trials in a row fail of anything but memory."""
        deadline = self._deadline()
        for trial in self.ledger.everything():
            self._learn(trial)
        seeds = [trial for trial in self.ledger.everything() if trial.role != CONFIRM]
        self.proposals.synchronize(seeds, self._judge)
        for baseline in baselines:
            if self._may_compare(baseline.role, deadline):
                self._seed(baseline.plan, baseline.role, {})
        for parameters, plan in self._predicted():
            if self._may_go_on(deadline):
                self._seed(plan, PREDICTED, parameters)
        self._sample(deadline)
        self._confirm()

    def _deadline(self) -> float:
        """On time.monotonic's clock; what the study's trials took in earlier runs is spent."""
        spent = sum(duration_seconds(trial) for trial in self.ledger.trials)
        return time.monotonic() + self.settings.time_limit - spent

    def _may_compare(self, role: str, deadline: float) -> bool:
        """Each role's first plan always, for the winner is compared with it; more of them from half of the trials."""
        is_first = all(trial.role != role for trial in self.ledger.everything())
        return is_first or (self._may_go_on(deadline) and len(self._spent()) <= self.settings.trials // 2)

    def _spent(self) -> list[FinishedTrial]:
        """The trials that count against the budget."""
        return [trial for trial in self.ledger.trials if ran(trial) and trial.role != CONFIRM]

    def _may_go_on(self, deadline: float) -> bool:
        """Whether a trial is left, and time for it and for the confirmation."""
        done = self._spent()
        durations = [duration_seconds(trial) for trial in done if isinstance(trial.result.outcome, Completed)]
        mean = sum(durations) / len(durations) if durations else 0.0
        runs_to_come = 1 + self.settings.confirm_rounds * (_FINALISTS + len(BASELINES))
        return len(done) < self.settings.trials and time.monotonic() + mean * runs_to_come < deadline

    def _predicted(self) -> list[tuple[Mapping[str, Any], Plan]]:
        """The plans of the grid that are predicted to be fastest, at most half of them of one pipeline degree."""
        ranked = []
        for parameters in self.space.grid():
            plan = self.space.plan(parameters)
            if plan is not None and self.runner.rejection(plan) is None:
                ranked.append((self.predictor.predict(plan).epoch_seconds, parameters, plan))
        chosen: list[tuple[Mapping[str, Any], Plan]] = []
        for _, parameters, plan in sorted(ranked, key=lambda entry: entry[0]):
            alike = sum(other.layout.pipeline == plan.layout.pipeline for _, other in chosen)
            if len(chosen) < _PREDICTED_PLANS and alike < (_PREDICTED_PLANS + 1) // 2:
                chosen.append((parameters, plan))
        return chosen

    def _sample(self, deadline: float) -> None:
        idle = 0
        while idle < _IDLE_SUGGESTIONS and self._may_go_on(deadline):
            trial = self.proposals.suggest()
            plan = self.space.plan(trial.params)
            if plan is None:
                self.proposals.tell(trial, None, SAMPLED, Judgement.nothing())
                idle += 1
                continue
            answer, is_new = self._answer(plan, SAMPLED, trial.params)
            idle = 0 if is_new and ran(answer) else idle + 1
            self.proposals.tell(trial, answer.id, SAMPLED, self._judge(answer))

    def _confirm(self) -> None:
        """Repeats the finalists in turns, so that a drift of the machine meets them all alike."""
        chosen = finalists(self._standings(), _FINALISTS)
        for number in range(self.settings.confirm_rounds):
            for standing in chosen:
                if self._confirmations(standing.plan) <= number:
                    self._run(standing.plan, CONFIRM, {})

    def _confirmations(self, plan: Plan) -> int:
        return sum(trial.role == CONFIRM and trial.plan.id == plan.id for trial in self.ledger.trials)

    def _standings(self) -> tuple[Standing, ...]:
        found = standings(self.ledger.everything())
        if not found:
            tried = len(self.ledger.trials)
            raise NoFeasiblePlan(f"none of the {tried} plans that were tried completed; raise hardware.memory_limit")
        return found

    def _seed(self, plan: Plan, role: str, parameters: Mapping[str, Any]) -> None:
        answer, is_new = self._answer(plan, role, parameters)
        if is_new:
            self.proposals.add(answer.id, role, parameters, self._judge(answer))

    def _answer(self, plan: Plan, role: str, parameters: Mapping[str, Any]) -> tuple[FinishedTrial, bool]:
        """(what came of the plan, whether it was tried just now)."""
        known = self.ledger.answer(plan)
        if known is None:
            return self._run(plan, role, parameters), True
        if known.study_id not in {trial.study_id for trial in self.ledger.trials}:
            self.listener(known, True)
        return known, False

    def _run(self, plan: Plan, role: str, parameters: Mapping[str, Any]) -> FinishedTrial:
        def attempt() -> Attempt:
            rejection = self.runner.rejection(plan)
            return Attempt(outcome=rejection) if rejection else self.runner.run(plan)

        trial = self.ledger.record(plan, role, parameters, attempt)
        self._learn(trial)
        self.listener(trial, False)
        self._stop_if_all_fail()
        return trial

    def _learn(self, trial: FinishedTrial) -> None:
        """Corrects the predictions of all plans by what came of this one."""
        self.predictor.learn(trial.plan, trial.result.outcome, self.settings)

    def _stop_if_all_fail(self) -> None:
        last = [trial.result.outcome for trial in self.ledger.trials if ran(trial)][-_FAILURES_IN_A_ROW:]
        causes = [outcome.cause for outcome in last if isinstance(outcome, Failed)]
        if len(causes) == _FAILURES_IN_A_ROW and not any(isinstance(cause, OutOfMemory) for cause in causes):
            raise TrialsKeepFailing(f"{len(causes)} trials in a row failed, the last with: {causes[-1]}")

    def _judge(self, trial: FinishedTrial) -> Judgement:
        predicted = self.predictor.predict(trial.plan).epoch_seconds
        return judge(trial.result.outcome, trial.result.epoch_seconds, predicted)
