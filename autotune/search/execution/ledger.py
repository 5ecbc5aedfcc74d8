"""The trials of one study and known trials of others. Every result is on disk as soon as it is there."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from autotune.machine.agent import Agent
from autotune.search.execution.run_result import RunResult
from autotune.search.roles import REPEATS, Role
from storage.records import FinishedTrial, RunningTrial, StudyRecord, TrialResult
from storage.spool import Spool
from storage.store import Store
from trials.errors import WireError
from trials.outcome import Completed, Crash, Failed, OutOfMemory, Rejected
from trials.plan import Plan

MOST_TRANSIENT_FAILURES = 2
"""Failures after which a study does not try a plan again, even if each may have had a transient cause."""


class Ledger(Protocol):
    """The trials of one study, on which other agents may work too."""

    agent_id: str | None
    trials: list[FinishedTrial]
    """Finished trials, in the order in which this process learnt of them."""
    open: tuple[RunningTrial, ...]
    """Running trials of every agent."""
    is_closing: bool
    """Whether another agent is ending the study."""

    def catch_up(self) -> tuple[list[FinishedTrial], list[RunningTrial]]:
        """Return (trials that other agents finished since the last call, trials given up as their agent is gone)."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Return a context that one agent at a time can enter."""

    def is_left(self, agent_id: str | None) -> bool:
        """Return whether an agent is gone; an unnamed agent counts as gone when this agent is alone."""

    def left(self) -> list[FinishedTrial]:
        """Return trials that no living agent adds to Optuna's study."""

    def everything(self) -> tuple[FinishedTrial, ...]:
        """Return the known trials of other studies, then those of this one."""

    def answer(self, plan: Plan) -> FinishedTrial | None:
        """Return the trial that answers the plan. A failure that may be transient answers it the second time.

        A trial that another study ended early answers nothing.
        """

    def begin(self, plan: Plan, role: Role, parameters: Mapping[str, Any]) -> RunningTrial | None:
        """Open a trial; return None when the plan is answered or another agent tries it, unless it is a repeat."""

    def put(self, trial: RunningTrial, run_result: RunResult) -> TrialResult:
        """Record the result of a run; callable from any thread. A number that cannot be stored is a failure."""

    def finish(self, trial: RunningTrial, result: TrialResult) -> FinishedTrial:
        """Close a trial whose result was put."""


class KnownTrials:
    """The part of a ledger that is in memory."""

    def __init__(self, agent_id: str | None, known: Iterable[FinishedTrial]) -> None:
        """`known` are trials of other studies on the same workload."""
        self.agent_id = agent_id
        self.trials: list[FinishedTrial] = []
        self.open: tuple[RunningTrial, ...] = ()
        self.is_closing = False
        self._known = list(known)
        # Another search ended it early as slower than its own best plan, which this one may not be able to hold.
        self._answers = [trial for trial in self._known if not is_shortened(trial)]

    def everything(self) -> tuple[FinishedTrial, ...]:
        return (*self._known, *self.trials)

    def answer(self, plan: Plan) -> FinishedTrial | None:
        found = [trial for trial in (*self._answers, *self.trials) if trial.plan == plan]
        conclusive = next(filter(is_conclusive, found), None)
        return found[-1] if conclusive is None and len(found) >= MOST_TRANSIENT_FAILURES else conclusive

    def _close(self, trial: RunningTrial, result: TrialResult) -> FinishedTrial:
        finished = trial.finish(result)
        self.open = tuple(other for other in self.open if other.id != trial.id)
        self.trials.append(finished)
        return finished


class StudyLedger(KnownTrials):
    """A ledger in the store. Every result is on disk as soon as it is there."""

    def __init__(
        self, store: Store, spool: Spool, study: StudyRecord, agent: Agent, known: Iterable[FinishedTrial]
    ) -> None:
        """Hand waiting results to the store, give up the trials of dead agents, and read those of the study.

        `known` are trials of other studies on the same workload.
        """
        # A rejection may be wrong today: it was a prediction.
        others = [trial for trial in known if trial.study_id != study.id and is_conclusive(trial) and ran(trial)]
        super().__init__(agent.id, others)
        self._store = store
        self._spool = spool
        self._study = study
        self._agent = agent
        spool.replay(store)
        for trial in store.running_trials():  # of every study: no other agent looks at one that has ended
            if trial.agent_id != agent.id and agent.is_gone(trial.agent_id):
                store.abandon_trial(trial.id)
        self.catch_up()

    def catch_up(self) -> tuple[list[FinishedTrial], list[RunningTrial]]:
        study = self._store.study(self._study.id)
        # Known results do not change: reading all of them after each trial would take longer and longer.
        now = self._store.trials(self._study.id, known=[trial.id for trial in self.trials])
        self.is_closing = study.finished is not None or (
            study.leader_id not in (None, self.agent_id) and not self._agent.is_gone(study.leader_id)
        )
        theirs = [trial for trial in now if trial.agent_id != self.agent_id]
        running = [trial for trial in theirs if isinstance(trial, RunningTrial)]
        gone = [trial for trial in running if self._agent.is_gone(trial.agent_id)]
        for trial in gone:
            self._store.abandon_trial(trial.id)
        # For this agent's trials the list in memory is right: the store has a result only after `finish`.
        ours = [trial for trial in self.open if trial.agent_id == self.agent_id]
        self.open = (*ours, *(trial for trial in running if trial not in gone))
        news = [trial for trial in theirs if isinstance(trial, FinishedTrial)]
        self.trials += news
        return news, gone

    def exclusive(self) -> AbstractContextManager[None]:
        return self._store.exclusive()

    def is_left(self, agent_id: str | None) -> bool:
        return self._agent.is_alone if agent_id is None else self._agent.is_gone(agent_id)

    def left(self) -> list[FinishedTrial]:
        return [*self._known, *(trial for trial in self.trials if self.is_left(trial.agent_id))]

    def begin(self, plan: Plan, role: Role, parameters: Mapping[str, Any]) -> RunningTrial | None:
        wanted = self._study.id, plan, str(role), parameters
        trial: RunningTrial | None = None
        if role in REPEATS:
            trial = self._store.start_trial(*wanted, agent_id=self._agent.id)
        elif self.answer(plan) is None:
            known = sum(trial.plan == plan for trial in self.trials)
            trial = self._store.claim_trial(*wanted, agent_id=self._agent.id, finished=known)
        self.open += (trial,) if trial else ()
        return trial

    def put(self, trial: RunningTrial, run_result: RunResult) -> TrialResult:
        try:
            result = run_result.result(trial.id, datetime.now(UTC))
            self._spool.keep(result, self._store)
        except (ValueError, WireError) as error:
            # A failure in its place, so that the trial does not stay open.
            failed = Failed(cause=Crash(rank=0, detail=f"results cannot be stored: {error}"))
            result = RunResult(outcome=failed).result(trial.id, datetime.now(UTC))
            self._spool.keep(result, self._store)
        return result

    def finish(self, trial: RunningTrial, result: TrialResult) -> FinishedTrial:
        self._spool.replay(self._store)
        return self._close(trial, result)


def ran(trial: FinishedTrial) -> bool:
    """Return whether the trial took device time."""
    return not isinstance(trial.result.outcome, Rejected)


def is_shortened(trial: FinishedTrial) -> bool:
    """Return whether the trial ended early, because it was clearly slower than the best plan of its study."""
    outcome = trial.result.outcome
    return isinstance(outcome, Completed) and outcome.shortened


def duration_seconds(trial: FinishedTrial) -> float:
    """Return how long the trial took, from its start to its result."""
    # The counted seconds are better: the two times may come from different clocks.
    counted, elapsed = trial.result.seconds, trial.result.finished - trial.started
    return max(elapsed.total_seconds(), 0.0) if counted is None else counted


def busy_seconds(trials: Iterable[FinishedTrial]) -> float:
    """Return the time during which at least one of the trials ran."""
    total, until = 0.0, datetime.min.replace(tzinfo=UTC)
    spans = ((trial.started, trial.started + timedelta(seconds=duration_seconds(trial))) for trial in trials)
    for started, finished in sorted(spans):
        total += max((finished - max(started, until)).total_seconds(), 0.0)
        until = max(until, finished)
    return total


def is_conclusive(trial: FinishedTrial) -> bool:
    """Return whether the outcome is due to the plan: not a crash or timeout, nor memory that others took."""
    match trial.result.outcome:
        case Failed(cause=OutOfMemory()):
            return not trial.result.is_disturbed
        case Failed():
            return False
        case _:
            return True
