"""Runs the trials of a study, and hands each result to the ledger, the advisor, Optuna's study and the listener."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import optuna

from autotune.events import Listener, TrialBegan, TrialEnded
from autotune.search.execution.failures import stop_if_all_fail
from autotune.search.execution.ledger import Ledger, ran
from autotune.search.execution.run_result import RunResult
from autotune.search.execution.runner import Runner
from autotune.search.execution.slots import TrialSlots
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.roles import Role
from autotune.search.sampling.advisor import Advisor
from autotune.search.sampling.proposals import Judgement, Proposals, judge
from autotune.search.space.space import Space
from autotune.search.winner import ranked
from storage.records import FinishedTrial, RunningTrial, TrialResult
from trials.plan import Plan

# A choice: short next to a trial, and two small queries a second on a database that agents share.
LOOK_SECONDS = 0.5
"""Between looks at what other agents did, while there is nothing else to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan to run a trial of."""

    plan: Plan
    role: Role
    suggestion: optuna.Trial | None = None
    """Optuna's trial, where the sampler suggested the plan."""
    timed_steps: int | None = None
    """Most steps to time; `search.timed_steps` when absent."""


_Slots: TypeAlias = TrialSlots[tuple[RunningTrial, Candidate], TrialResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """Executor of candidates on the runners, together with the other agents of the study."""

    ledger: Ledger
    proposals: Proposals
    space: Space
    predictor: CalibratedPredictor
    advisor: Advisor
    listener: Listener

    def run(self, candidates: Iterator[Candidate | None], runners: Sequence[Runner]) -> None:
        """Run the candidates, each as soon as a runner is free, and wait until all trials have ended.

        None among the candidates means that there is none yet: the next one is asked for after a trial has ended.

        Raise NoFeasiblePlan or TrialsKeepFailing when the trials of this agent keep failing.
        """
        with _Slots(runners) as slots:
            for candidate in candidates:
                if candidate is not None:
                    self._start(candidate, slots, runners[0])
                elif not slots.running:
                    time.sleep(LOOK_SECONDS)  # other agents run trials of this study
                self._collect(slots, wait_for_one=candidate is None or slots.running == len(runners))
                self.catch_up()
            while slots.running:
                self._collect(slots, wait_for_one=True)

    def catch_up(self) -> None:
        """Learn from what other agents of the study finished since the last time."""
        news, gone = self.ledger.catch_up()
        for trial in news:
            self.advisor.learn(trial)
            self.listener(TrialEnded(trial=trial, is_known=True))
        if gone:  # or Optuna would take their plans for running for ever
            self.synchronize()

    def synchronize(self) -> None:
        """Bring Optuna's study in line with the trials that agents left behind that are gone."""
        with self.ledger.exclusive():
            self.proposals.synchronize(self.ledger.left(), self.judge, self.ledger.is_left)

    def judge(self, trial: FinishedTrial) -> Judgement:
        return judge(trial.result.outcome, trial.result.epoch_seconds, self.predictor.epoch_seconds(trial.plan))

    def _start(self, candidate: Candidate, slots: _Slots, runner: Runner) -> None:
        plan, suggestion = candidate.plan, candidate.suggestion
        trial = self.ledger.begin(plan, candidate.role, self.space.point(plan) or {})
        if trial is None:  # another agent was faster
            if suggestion:
                self.proposals.tell(suggestion, None, Judgement.nothing())
            return
        # After it was begun: a rejection is the result of a trial, too, and is stored as one.
        if rejection := runner.rejection(plan, candidate.role):
            self._record(trial, candidate, self.ledger.put(trial, RunResult(outcome=rejection)))
            return
        on_step = self.proposals.pruning(suggestion, self.advisor.to_beat()) if suggestion else None

        def measure(runner: Runner, on_wait: Callable[[], None]) -> TrialResult:
            return self.ledger.put(trial, runner.run(plan, on_step, on_wait, candidate.timed_steps))

        self.listener(TrialBegan(trial=trial))
        slots.start((trial, candidate), measure)

    def _collect(self, slots: _Slots, *, wait_for_one: bool) -> None:
        for (trial, candidate), result in slots.done(wait_for_one=wait_for_one):
            self._record(trial, candidate, result)

    def _record(self, running: RunningTrial, candidate: Candidate, result: TrialResult) -> None:
        trial = self.ledger.finish(running, result)
        self.advisor.learn(trial)
        self.listener(TrialEnded(trial=trial, is_known=False))
        if candidate.suggestion:
            self.proposals.tell(candidate.suggestion, trial, self.judge(trial))
        else:
            self.proposals.add(trial, self.judge(trial))
        # What fails here may work on another agent's machine.
        own = [trial for trial in self.ledger.trials if trial.agent_id == self.ledger.agent_id and ran(trial)]
        stop_if_all_fail(own, found_any=bool(ranked(self.ledger.everything())))
