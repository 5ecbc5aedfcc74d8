"""Values that the store takes and returns: immutable, with times in UTC."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from storage.baseline import Baseline, check_speed
from storage.explanation import Explanation, PlanTime
from storage.launch_speed import LaunchWindow
from trials.outcome import Completed, Outcome
from trials.plan import Plan
from trials.workload import Hardware, ModelShape, Software, Workload

_UUID_HEX = re.compile("[0-9a-f]{32}")
# A choice: names stay short, and of 1,000 studies of one model two share these 32 bits with a chance of 0.01 %.
STUDY_DIGITS = 8
"""Digits of its id in the name of a study."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """A stored layer profile, and what was measured."""

    hardware: Hardware
    model: ModelShape
    software: Software
    created: datetime
    document: str
    """JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRecord:
    """A process that runs trials, as of its last heartbeat."""

    id: str
    machine: str
    """Equal for processes that see each other's process ids."""
    process: str
    """Process id and start time, since ids are reused."""
    beats: int
    """Number of heartbeats."""
    silent_seconds: float | None = field(default=None, compare=False)
    """Time since the last heartbeat, by the clock of the database; None if unknown."""
    study_id: str | None = None
    """The study that it works on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """One search on one workload."""

    id: str
    name: str
    """Unique, for people and for Optuna: the model's name and the beginning of `id`."""
    workload_fingerprint: str
    settings: Mapping[str, object]
    """Settings of the search, as JSON values."""
    seed: int
    started: datetime
    finished: datetime | None
    calibration_state: str | None = None
    """Calibration state as JSON, for searches on similar workloads; None before the end."""
    leader_id: str | None = None
    """The agent that concludes it; None while all explore."""
    archived: datetime | None = None
    """When it was archived: since then it is used only where it is named."""
    imported_from: str | None = None
    """Name of the database that it was imported from; None for a local study."""

    def named(self, workload: Workload) -> Workload:
        """Return the workload of this study with the name that the model has here; see `named`."""
        return named(workload, self.name)


def study_name(model_name: str, study_id: str) -> str:
    """Return the name of a study of a model."""
    return f"{model_name}-{study_id[:STUDY_DIGITS]}"


def named(workload: Workload, study: str) -> Workload:
    """Return a workload with the model's name in the study of this name.

    A model is stored once for its architecture, with the name of the first folder that had it.
    """
    return replace(workload, model=replace(workload.model, name=study[: -STUDY_DIGITS - 1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class DisturbedRun:
    """A run of a trial that does not count, because other load on the machine disturbed it."""

    outcome: Outcome
    epoch_seconds: float | None
    disturbance: str
    """What disturbed it, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """How a trial ended. Self-contained, so that it can wait on disk for its database."""

    trial_id: str
    outcome: Outcome
    epoch_seconds: float | None
    """Estimate for one epoch of the workload's data; only a completed trial has one."""
    epoch_seconds_error: float | None
    """Standard error of `epoch_seconds`."""
    finished: datetime
    disturbance: str | None = None
    """What disturbed the run, for messages; None for a trusted result."""
    energy_joules: float | None = None
    """Energy of all devices in the timed steps."""
    disturbed: tuple[DisturbedRun, ...] = ()
    """The runs before the one that counts, oldest first."""
    seconds: float | None = None
    """Duration of the trial with all its runs, by a monotonic clock; None if unknown."""

    def __post_init__(self) -> None:
        if not _UUID_HEX.fullmatch(self.trial_id):  # it becomes a file name
            raise ValueError(f"a trial id is 32 hexadecimal digits, not {self.trial_id!r}")
        _check_estimate(self.outcome.kind, self.epoch_seconds, self.epoch_seconds_error)
        _to_utc(self, "finished")

    @property
    def is_disturbed(self) -> bool:
        """Whether the run that counts was disturbed as well."""
        return self.disturbance is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSummary:
    """A finished trial, without its plan and the measurements of its ranks, which take most of the time to read."""

    study_id: str
    plan_id: str
    role: str
    kind: Literal["completed", "rejected", "failed"]
    """How it ended: that of the outcome."""
    shortened: bool
    """That of `Completed`."""
    epoch_seconds: float | None
    disturbance: str | None
    finished: datetime

    def __post_init__(self) -> None:
        _check_estimate(self.kind, self.epoch_seconds, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRecord:
    """One trial of a plan: a `RunningTrial`, an `AbandonedTrial` or a `FinishedTrial`."""

    id: str
    study_id: str
    number: int
    """Position in the study, from 0 without gaps, in the order of start."""
    plan: Plan
    role: str
    """Why it ran: `default`, `predicted`, `sampled`, `confirm`."""
    parameters: Mapping[str, object]
    """The plan's point in the search space, as JSON values; empty for a plan outside it."""
    started: datetime
    agent_id: str | None = None
    """The agent that ran it; None if it ran without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTrial(TrialRecord):
    """No result is known yet; its process may be alive or gone."""

    def finish(self, result: TrialResult) -> "FinishedTrial":
        """Return the same trial with its result."""
        kept = {each.name: getattr(self, each.name) for each in fields(TrialRecord)}
        return FinishedTrial(**kept, result=result)


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonedTrial(TrialRecord):
    """Abandoned because its process is gone. A late result makes it a `FinishedTrial`."""

    abandoned: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedTrial(TrialRecord):
    """A trial with its result, which never changes."""

    result: TrialResult
    given_up: datetime | None = None
    """When it was abandoned, if its result came later."""

    @property
    def summary(self) -> TrialSummary:
        outcome = self.result.outcome
        return TrialSummary(
            study_id=self.study_id,
            plan_id=self.plan.id,
            role=self.role,
            kind=outcome.kind,
            shortened=isinstance(outcome, Completed) and outcome.shortened,
            epoch_seconds=self.result.epoch_seconds,
            disturbance=self.result.disturbance,
            finished=self.result.finished,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPlan:
    """A measured plan of a study for which every other plan is worse in one of the objectives, or equal in all."""

    plan: Plan
    estimated_samples_per_second: float
    """Estimated: samples of an epoch over the time that trials give it."""
    peak_bytes: int
    """Peak bytes of the fullest rank."""
    joules_per_sample: float | None
    """None where the devices do not count it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestPlan:
    """The winner of a study, with what it was measured on."""

    plan: Plan
    workload: Workload
    study_id: str
    epoch_seconds: float
    epoch_seconds_error: float
    estimated_samples_per_second: float
    """Estimated: samples of an epoch over `epoch_seconds`."""
    estimated_samples_per_second_error: float
    """Standard error."""
    baselines: tuple[Baseline, ...]
    """The fastest first."""
    created: datetime
    search_seconds: float = 0.0
    """Duration of the trials of the study."""
    confidence: float | None = None
    """Probability that no other finalist is faster, and at most that no baseline is by their own runs; None when there
    was no other."""
    ties: tuple[str, ...] = ()
    """Ids of the plans whose speed does not differ significantly from it."""
    pareto: tuple[ParetoPlan, ...] = ()
    """The plans that no other plan beats in every objective; empty unless several objectives were asked for."""
    explanation: Explanation | None = None
    """Why it won; None for a winner that an earlier version stored, or whose steps are not of this epoch."""
    imported_from: str | None = None
    """Name of the database that it was imported from; None for a local winner."""
    trainer: str | None = None
    """Trainer within whose limits the study searched; None without one."""
    parallel: int = 1
    """Groups of ranks on which trials ran at the same time."""

    def __post_init__(self) -> None:
        check_speed(self.estimated_samples_per_second)
        _to_utc(self, "created")

    @property
    def fastest_baseline(self) -> Baseline | None:
        """The one over which a gain is stated first: the fastest that may win and is not the winner itself.

        Without one, the winner's own if that may win, else one that can only be compared; None without any.
        """
        return min(self.baselines, key=lambda baseline: (*baseline.rank_of_choice, baseline.gain), default=None)

    @property
    def is_baseline(self) -> bool:
        """Whether the winner is the plan of a baseline."""
        return any(baseline.is_best for baseline in self.baselines)

    @property
    def not_run(self) -> tuple[str, ...]:
        """Roles of the baselines that the limits of the search left out."""
        return () if self.explanation is None else self.explanation.not_run


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedPlan:
    """A plan that a study tried, with its trials there and the winner of the study."""

    plan: Plan
    workload: Workload
    study: StudyRecord
    winner: BestPlan | None
    """Winner of the study: this plan or another; None while there is none."""
    trials: tuple[TrialRecord, ...]
    """Trials of the plan in the study, in order of number."""

    @property
    def won(self) -> BestPlan | None:
        """The winner, where it is this plan."""
        return self.winner if self.winner is not None and self.winner.plan.id == self.plan.id else None

    @property
    def time(self) -> PlanTime | None:
        """Where the time of the plan goes; None for a plan that the study did not compare with its winner."""
        why = self.winner.explanation if self.winner is not None else None
        return None if why is None else why.of(self.plan.id)

    @property
    def imported_from(self) -> str | None:
        """Name of the database that the study was imported from; None for a local study."""
        return self.study.imported_from


LaunchStatus: TypeAlias = Literal["finished", "paused", "failed", "interrupted"]
"""How a full training ended: paused after as many steps as were asked for, interrupted by a request or a kill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """How a full training ended. Self-contained, so that it can wait on disk for its database."""

    launch_id: str
    status: LaunchStatus
    steps: int
    """Optimizer steps done."""
    training_samples_per_second: float | None
    """Samples over seconds of this launch's steps but the first, which warms up; None where there are none."""
    finished: datetime

    def __post_init__(self) -> None:
        _to_utc(self, "finished")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """One full training with a plan."""

    id: str
    plan_id: str
    workload_fingerprint: str
    started: datetime
    promised_samples_per_second: float | None
    """Speed by the search, for its samples; a window has that for samples of as many tokens as its own."""
    result: LaunchResult | None
    """None while it runs, or if its process died without reporting."""
    agent_id: str | None = None
    """The agent that runs it."""
    windows: tuple[LaunchWindow, ...] = ()
    """Its speed, in order of steps."""
    imported_from: str | None = None
    """Name of the database that it was imported from; None for a local training."""


def _check_estimate(kind: str, seconds: float | None, error: float | None) -> None:
    """Raise ValueError unless the estimate is finite, and there is one for a completed trial alone."""
    if (seconds is None) == (kind == "completed"):
        raise ValueError(f"a trial that is {kind} has {'no' if seconds is None else 'an'} estimate of epoch_seconds")
    if not all(value is None or math.isfinite(value) for value in (seconds, error)):
        raise ValueError(f"epoch_seconds must be finite, not {seconds} +- {error}")


def _to_utc(value: object, field: str) -> None:
    # Equality needs one zone: a local time in the hour that winter time repeats equals no time of another zone.
    time: datetime = getattr(value, field)
    if time.tzinfo is None:
        raise ValueError(f"{field} {time} has no time zone; use datetime.now(UTC)")
    object.__setattr__(value, field, time.astimezone(UTC))
