"""What one study knows: its own trials and earlier answers. Every result is on disk as soon as it is there."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from autotune.machine.agent import Agent
from autotune.search.execution.attempt import Attempt
from storage.records import FinishedTrial, RunningTrial, StudyRecord, TrialResult
from storage.spool import Spool
from storage.store import Store
from trials.errors import WireError
from trials.outcome import Crash, Failed, OutOfMemory, Rejected
from trials.plan import Plan

BASELINE_PRESENT, BASELINE_DEFAULT, BASELINE_KEPT, BASELINE_OMNIBAL = (
    "present",
    "default",
    "default-no-recompute",
    "omnibal",
)
BASELINES = (BASELINE_PRESENT, BASELINE_DEFAULT, BASELINE_KEPT, BASELINE_OMNIBAL)
INHERITED, PREDICTED, SAMPLED, REFERENCE, CONFIRM = "inherited", "predicted", "sampled", "reference", "confirm"
MOST_ACCIDENTS = 2
"""Failures of a plan in one study after which it is not tried again, though they may not lie in the plan."""
AGAIN = (REFERENCE, CONFIRM)
"""Roles of a plan that was tried before."""

Listener = Callable[[FinishedTrial, bool], None]
"""Told of each trial as it ends, and whether its answer was known before."""


class Ledger(Protocol):
    """The trials of one study, on which other agents may work too."""

    agent_id: str | None
    trials: list[FinishedTrial]
    """In the order in which they became known here."""
    open: tuple[RunningTrial, ...]
    """Those that run, of every agent."""
    is_closing: bool
    """Whether another agent is ending the study."""

    def catch_up(self) -> tuple[list[FinishedTrial], list[RunningTrial]]:
        """(what other agents finished since the last time, what was given up because its agent is gone)."""

    def exclusive(self) -> AbstractContextManager[None]:
        """Make other agents that ask for the same wait meanwhile."""

    def is_left(self, agent_id: str | None) -> bool:
        """Whether what this agent began is left behind; of an unnamed one, when no other could have begun it."""

    def left(self) -> list[FinishedTrial]:
        """Trials of which no living agent tells Optuna."""

    def everything(self) -> tuple[FinishedTrial, ...]:
        """Known trials of other studies, then those of this one."""

    def answer(self, plan: Plan) -> FinishedTrial | None:
        """What is known of the plan. A failure that may have been an accident counts when it came twice here."""

    def begin(self, plan: Plan, role: str, parameters: Mapping[str, Any]) -> RunningTrial | None:
        """Open a trial. None when the plan is answered or was tried meanwhile, unless it is to be run again."""

    def put(self, trial: RunningTrial, attempt: Attempt) -> TrialResult:
        """Keep what came of it, in any thread."""

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

    def everything(self) -> tuple[FinishedTrial, ...]:
        return (*self._known, *self.trials)

    def answer(self, plan: Plan) -> FinishedTrial | None:
        found = [trial for trial in self.everything() if trial.plan.id == plan.id]
        told = next(filter(says_something, found), None)
        return found[-1] if told is None and len(found) >= MOST_ACCIDENTS else told

    def _close(self, trial: RunningTrial, result: TrialResult) -> FinishedTrial:
        finished = FinishedTrial(
            id=trial.id,
            study_id=trial.study_id,
            number=trial.number,
            plan=trial.plan,
            role=trial.role,
            parameters=trial.parameters,
            started=trial.started,
            agent_id=trial.agent_id,
            result=result,
        )
        self.open = tuple(other for other in self.open if other.id != trial.id)
        self.trials.append(finished)
        return finished


class StudyLedger(KnownTrials):
    """A ledger in the store. Every result is on disk as soon as it is there."""

    def __init__(
        self, store: Store, spool: Spool, study: StudyRecord, agent: Agent, known: Iterable[FinishedTrial]
    ) -> None:
        """`known` are trials of other studies on the same workload."""
        super().__init__(agent.id, [trial for trial in known if trial.study_id != study.id and _holds(trial)])
        self._store = store
        self._spool = spool
        self._study = study
        self._agent = agent
        spool.replay(store)
        for trial in store.running_trials():  # of every study: where one has ended, nobody else would look
            if trial.agent_id != agent.id and agent.is_gone(trial.agent_id):
                store.abandon_trial(trial.id)
        self.catch_up()

    def catch_up(self) -> tuple[list[FinishedTrial], list[RunningTrial]]:
        study, now = self._store.study(self._study.id), self._store.trials(self._study.id)
        self.is_closing = study.finished is not None or (
            study.leader_id not in (None, self.agent_id) and not self._agent.is_gone(study.leader_id)
        )
        theirs = [trial for trial in now if trial.agent_id != self.agent_id]
        running = [trial for trial in theirs if isinstance(trial, RunningTrial)]
        gone = [trial for trial in running if self._agent.is_gone(trial.agent_id)]
        for trial in gone:
            self._store.abandon_trial(trial.id)
        ours = [trial for trial in self.open if trial.agent_id == self.agent_id]
        self.open = (*ours, *(trial for trial in running if trial not in gone))
        known = {trial.id for trial in self.trials}
        news = [trial for trial in theirs if isinstance(trial, FinishedTrial) and trial.id not in known]
        self.trials += news
        return news, gone

    def exclusive(self) -> AbstractContextManager[None]:
        return self._store.exclusive()

    def is_left(self, agent_id: str | None) -> bool:
        return self._agent.is_alone if agent_id is None else self._agent.is_gone(agent_id)

    def left(self) -> list[FinishedTrial]:
        return [*self._known, *(trial for trial in self.trials if self.is_left(trial.agent_id))]

    def begin(self, plan: Plan, role: str, parameters: Mapping[str, Any]) -> RunningTrial | None:
        wanted = self._study.id, plan, role, parameters, self._agent.id
        trial: RunningTrial | None = None
        if role in AGAIN:
            trial = self._store.start_trial(*wanted)
        elif self.answer(plan) is None:
            known = sum(trial.plan.id == plan.id for trial in self.trials)
            trial = self._store.claim_trial(*wanted, finished=known)
        self.open += (trial,) if trial else ()
        return trial

    def put(self, trial: RunningTrial, attempt: Attempt) -> TrialResult:
        """Keep what came of it on disk. What holds a number that cannot be kept is a failure."""
        try:
            result = attempt.result(trial.id, datetime.now(UTC))
            self._spool.keep(result, self._store)
        except (ValueError, WireError) as error:
            failed = Failed(cause=Crash(rank=0, detail=f"results cannot be stored: {error}"))
            result = Attempt(outcome=failed).result(trial.id, datetime.now(UTC))
            self._spool.keep(result, self._store)
        return result

    def finish(self, trial: RunningTrial, result: TrialResult) -> FinishedTrial:
        self._spool.replay(self._store)
        return self._close(trial, result)


def ran(trial: FinishedTrial) -> bool:
    """Whether it took device time."""
    return not isinstance(trial.result.outcome, Rejected)


def duration_seconds(trial: FinishedTrial) -> float:
    """From its start to its result; what was counted is better than the difference of two clocks' times."""
    counted, told = trial.result.seconds, trial.result.finished - trial.started
    return max(told.total_seconds(), 0.0) if counted is None else counted


def busy_seconds(trials: Iterable[FinishedTrial]) -> float:
    """While at least one of them ran."""
    total, until = 0.0, datetime.min.replace(tzinfo=UTC)
    ends = ((trial.started, trial.started + timedelta(seconds=duration_seconds(trial))) for trial in trials)
    for started, finished in sorted(ends):
        total += max((finished - max(started, until)).total_seconds(), 0.0)
        until = max(until, finished)
    return total


def says_something(trial: FinishedTrial) -> bool:
    """Whether the outcome lies in the plan: not a crash, nor memory that others took."""
    match trial.result.outcome:
        case Failed(cause=OutOfMemory()):
            return trial.result.contamination is None
        case Failed():
            return False
        case _:
            return True


def _holds(trial: FinishedTrial) -> bool:
    """Whether the answer would be the same today: a measurement, or too little memory."""
    return says_something(trial) and ran(trial)
