"""What one study knows: its own trials and earlier answers. Every result is on disk before the next trial starts."""

from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from autotune.search.runner import Attempt
from storage.records import FinishedTrial, StudyRecord
from storage.spool import Spool
from storage.store import Store
from trials.outcome import Completed, Failed, OutOfMemory, Rejected
from trials.plan import Plan

BASELINE_PRESENT, BASELINE_DEFAULT, BASELINE_KEPT, BASELINE_OMNIBAL = (
    "present",
    "default",
    "default-no-recompute",
    "omnibal",
)
BASELINES = (BASELINE_PRESENT, BASELINE_DEFAULT, BASELINE_KEPT, BASELINE_OMNIBAL)
INHERITED, PREDICTED, SAMPLED, REFERENCE, CONFIRM = "inherited", "predicted", "sampled", "reference", "confirm"

Listener = Callable[[FinishedTrial, bool], None]
"""Told of each trial as it ends, and whether its answer was known before."""


class Ledger:
    """The trials of one study, in the store and in memory."""

    def __init__(self, store: Store, spool: Spool, study: StudyRecord, known: Iterable[FinishedTrial]) -> None:
        """Gives up what an interrupted run left open. `known` are trials of other studies on the same workload."""
        self._store = store
        self._spool = spool
        self._study = study
        spool.replay(store)
        for trial in store.running_trials(study.id):
            store.abandon_trial(trial.id)
        self.trials = [trial for trial in store.trials(study.id) if isinstance(trial, FinishedTrial)]
        self._known = [trial for trial in known if trial.study_id != study.id and _holds(trial)]

    def everything(self) -> tuple[FinishedTrial, ...]:
        """Known trials of other studies, then those of this one."""
        return (*self._known, *self.trials)

    def answer(self, plan: Plan) -> FinishedTrial | None:
        """What is known of the plan; a failure counts only within this study, for it may have been an accident."""
        return next((trial for trial in self.everything() if trial.plan.id == plan.id), None)

    def record(
        self, plan: Plan, role: str, parameters: Mapping[str, Any], attempt: Callable[[], Attempt]
    ) -> FinishedTrial:
        """Runs a trial between its two entries."""
        started = self._store.start_trial(self._study.id, plan, role, parameters)
        result = attempt().result(started.id, datetime.now(UTC))
        self._spool.put(result)
        self._spool.replay(self._store)
        finished = FinishedTrial(
            id=started.id,
            study_id=started.study_id,
            number=started.number,
            plan=plan,
            role=role,
            parameters=parameters,
            started=started.started,
            result=result,
        )
        self.trials.append(finished)
        return finished


def ran(trial: FinishedTrial) -> bool:
    """Whether it took device time."""
    return not isinstance(trial.result.outcome, Rejected)


def duration_seconds(trial: FinishedTrial) -> float:
    """From its start to its result."""
    return (trial.result.finished - trial.started).total_seconds()


def _holds(trial: FinishedTrial) -> bool:
    """Whether the answer would be the same today: a measurement, or too little memory."""
    outcome = trial.result.outcome
    return isinstance(outcome, Completed) or (isinstance(outcome, Failed) and isinstance(outcome.cause, OutOfMemory))
