"""Conversion of rows to values and back."""

from collections.abc import Mapping
from dataclasses import fields
from functools import cache, lru_cache
from typing import Any, TypeVar, cast

from sqlalchemy import Column, ColumnElement, Table

from storage.baseline import Baseline
from storage.database.rows import Row
from storage.database.tables import (
    ABANDONED,
    ATTEMPT,
    BEST_PLAN,
    BUNDLE,
    DATA_PROFILE,
    HARDWARE,
    LAUNCH,
    LAUNCH_WINDOW,
    LAYER_PROFILE,
    MODEL,
    OUTCOME,
    PLAN,
    RUNNING,
    STUDY,
    TRIAL,
    WORKLOAD,
)
from storage.errors import NotStorable
from storage.explanation import Explanation
from storage.launch_speed import LaunchWindow, StepParts
from storage.records import (
    AbandonedTrial,
    BestPlan,
    DisturbedRun,
    FinishedTrial,
    LaunchRecord,
    LaunchResult,
    LayerProfile,
    ParetoPlan,
    RunningTrial,
    StudyRecord,
    TrialResult,
    TrialSummary,
    named,
)
from storage.validity import parallel_of
from trials import wire
from trials.errors import WireError
from trials.outcome import Completed, Failed, Outcome, OutOfMemory
from trials.plan import Packed, Plan
from trials.workload import DataProfile, Hardware, ModelShape, Software, Workload

V = TypeVar("V")
Histogram = tuple[tuple[int, int, int], ...]
"""As in `DataProfile`."""

_DOCUMENTS: dict[str, Any] = {
    "baselines": tuple[Baseline, ...],
    "ties": tuple[str, ...],
    "pareto": tuple[ParetoPlan, ...],
}
"""Fields of a BestPlan that are stored as canonical JSON."""
SUMMARY: Mapping[str, ColumnElement[Any]] = {
    **{name: TRIAL.c[name] for name in ("study_id", "plan_id", "role", "finished")},
    **{name: OUTCOME.c[name] for name in ("kind", "epoch_seconds", "disturbance")},
    # The document is canonical, and escapes the quotes of its texts.
    "shortened": OUTCOME.c.document.contains('"shortened":true'),
}
"""Columns of a TrialSummary by field."""


def columns(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, which are also the names of its columns."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def workload_row(value: Workload) -> dict[str, Any]:
    return {
        "fingerprint": value.fingerprint,
        "hardware_fingerprint": value.hardware.fingerprint,
        "model_fingerprint": value.model.fingerprint,
        "data_fingerprint": value.data.fingerprint,
        "oversize": value.oversize,
        "global_batch_samples": value.global_batch_samples,
        "memory_limit_bytes": value.memory_limit_bytes,
        **columns(value.software),
    }


def hardware(row: Row) -> Hardware:
    return _value(Hardware, HARDWARE, row)


def model(row: Row) -> ModelShape:
    return _value(ModelShape, MODEL, row)


def data(row: Row) -> DataProfile:
    return _value(DataProfile, DATA_PROFILE, row, histogram=histogram(row[DATA_PROFILE.c.histogram]))


def histogram(buckets: list[list[int]]) -> Histogram:
    # JSON has only lists, which no tuple equals.
    return tuple(cast(tuple[int, int, int], tuple(bucket)) for bucket in buckets)


def workload(row: Row) -> Workload:
    return Workload(
        model=model(row),
        data=data(row),
        hardware=hardware(row),
        software=_value(Software, WORKLOAD, row),
        oversize=row[WORKLOAD.c.oversize],
        global_batch_samples=row[WORKLOAD.c.global_batch_samples],
        memory_limit_bytes=row[WORKLOAD.c.memory_limit_bytes],
    )


def layer_profile(row: Row) -> LayerProfile:
    given = {"hardware": hardware(row), "model": model(row), "software": _value(Software, LAYER_PROFILE, row)}
    return _value(LayerProfile, LAYER_PROFILE, row, **given)


def study(row: Row) -> StudyRecord:
    return _value(StudyRecord, STUDY, row, imported_from=row.get(BUNDLE.c.source))


def plan_row(value: Plan) -> dict[str, Any]:
    # Copies of fields for queries alone: a plan is read from its document.
    layout, packed = value.layout, value.packing if isinstance(value.packing, Packed) else None
    return {
        "id": value.id,
        "document": value.document,
        "qv": packed and packed.qv,
        "qt": packed and packed.qt,
        "pipeline": layout.pipeline,
        "data": layout.data,
        "zero": layout.zero,
        "tensor": layout.tensor,
    }


def plan(row: Row) -> Plan:
    return _plan(row[PLAN.c.document])


@lru_cache(maxsize=4096)  # trials repeat plans, each of which computes its id once
def _plan(document: str) -> Plan:
    return wire.decode(Plan, document)


def outcome_of(document: str) -> Outcome:
    found: Outcome = wire.decode(Outcome, document)
    return found


def outcome_row(result: TrialResult) -> dict[str, Any]:
    return {
        "trial_id": result.trial_id,
        "kind": result.outcome.kind,
        "epoch_seconds": result.epoch_seconds,
        "epoch_seconds_error": result.epoch_seconds_error,
        "disturbance": result.disturbance,
        "energy_joules": result.energy_joules,
        "seconds": result.seconds,
        "document": _encoded(result.outcome, Outcome),
        **queried(result.outcome),
    }


def attempt_rows(result: TrialResult) -> list[dict[str, Any]]:
    return [
        {
            "trial_id": result.trial_id,
            "number": number,
            "kind": run.outcome.kind,
            "epoch_seconds": run.epoch_seconds,
            "disturbance": run.disturbance,
            "document": _encoded(run.outcome, Outcome),
        }
        for number, run in enumerate(result.disturbed)
    ]


def stage_rows(trial_id: str, outcome: Outcome) -> list[dict[str, Any]]:
    if not isinstance(outcome, Completed):
        return []
    stages = enumerate(outcome.measurement.stages)
    return [{"trial_id": trial_id, "rank": rank, **columns(stage)} for rank, stage in stages]


def trial(row: Row) -> RunningTrial | AbandonedTrial | FinishedTrial:
    """Return the trial of a row that has its attempts by `ATTEMPT` (`storage.queries.studies.whole_trials`)."""
    status, finished = row[TRIAL.c.status], row[TRIAL.c.finished]
    if status == RUNNING:
        return _value(RunningTrial, TRIAL, row, plan=plan(row))
    if status == ABANDONED:
        return _value(AbandonedTrial, TRIAL, row, plan=plan(row), abandoned=_present(finished))
    return _value(FinishedTrial, TRIAL, row, plan=plan(row), result=result(row))


def result(row: Row) -> TrialResult:
    """Return the result of the same row. Raise AssertionError if it has none."""
    given = {
        "trial_id": _present(row[OUTCOME.c.trial_id]),
        "outcome": outcome_of(row[OUTCOME.c.document]),
        "finished": _present(row[TRIAL.c.finished]),
        "disturbed": tuple(
            _value(DisturbedRun, ATTEMPT, run, outcome=outcome_of(run[ATTEMPT.c.document])) for run in row[ATTEMPT]
        ),
    }
    return _value(TrialResult, OUTCOME, row, **given)


def summary(row: Row) -> TrialSummary:
    return TrialSummary(**{name: row[column] for name, column in SUMMARY.items()})


def best_plan_row(value: BestPlan) -> dict[str, Any]:
    documents: dict[str, str | None] = {name: _encoded(getattr(value, name), kind) for name, kind in _DOCUMENTS.items()}
    documents["explanation"] = None if value.explanation is None else _encoded(value.explanation)
    # Plan and workload are stored by their keys; the source follows from the provenance, others from the study.
    replaced = {"plan", "workload", "imported_from", "trainer", "parallel", *documents}
    kept = {name: column for name, column in columns(value).items() if name not in replaced}
    return {"plan_id": value.plan.id, "workload_fingerprint": value.workload.fingerprint, **documents, **kept}


def best_plan(row: Row) -> BestPlan:
    documents = {name: wire.decode(kind, row[BEST_PLAN.c[name]]) for name, kind in _DOCUMENTS.items()}
    why = row[BEST_PLAN.c.explanation]
    documents["explanation"] = None if why is None else wire.decode(Explanation, why)
    study = row.get(STUDY.c.name)
    work = workload(row) if study is None else named(workload(row), study)
    settings = row.get(STUDY.c.settings, {})
    given = {"plan": plan(row), "workload": work, "imported_from": row.get(BUNDLE.c.source)}
    given |= {"trainer": settings.get("trainer"), "parallel": parallel_of(settings)}
    return _value(BestPlan, BEST_PLAN, row, **given, **documents)


def launch(row: Row) -> LaunchRecord:
    """Return the launch of a row, without its windows."""
    ended = None if row[LAUNCH.c.status] == RUNNING else launch_result(row)
    return _value(LaunchRecord, LAUNCH, row, result=ended, windows=(), imported_from=row.get(BUNDLE.c.source))


def launch_result(row: Row) -> LaunchResult:
    return _value(LaunchResult, LAUNCH, row, launch_id=row[LAUNCH.c.id])


def window_row(value: LaunchWindow) -> dict[str, Any]:
    return {**columns(value), "parts": _encoded(value.parts)}


def window(row: Row) -> LaunchWindow:
    return _value(LaunchWindow, LAUNCH_WINDOW, row, parts=wire.decode(StepParts, row[LAUNCH_WINDOW.c.parts]))


def _encoded(value: object, kind: Any = None) -> str:
    try:
        return wire.encode(value, kind)
    except WireError as error:
        raise NotStorable(f"nothing was stored: {error}") from error


def _value(kind: type[V], table: Table, row: Row, **given: object) -> V:
    """Return a dataclass with the values of the columns that have the names of its fields."""
    named = _columns_by_field(cast(Any, kind), table).items()
    return kind(**{name: given[name] if name in given else row[column] for name, column in named})


@cache
def _columns_by_field(kind: Any, table: Table) -> Mapping[str, Column[Any] | None]:
    """Return the column of each field of a dataclass; None for a field that has none."""
    return {field.name: table.c.get(field.name) for field in fields(kind)}


def queried(outcome: Outcome) -> dict[str, Any]:
    """Return the parts of the document that have columns of their own, so that queries can use them."""
    if isinstance(outcome, Completed):
        measurement = outcome.measurement
        return {
            "measured_samples_per_second": measurement.measured_samples_per_second,
            "peak_bytes": measurement.peak_bytes,
        }
    if isinstance(outcome, Failed):
        cause = outcome.cause
        stage = cause.stage if isinstance(cause, OutOfMemory) else None
        return {"failure_kind": cause.kind, "failure_detail": _text(str(cause)), "failure_stage": stage}
    return {"failure_detail": _text(outcome.reason)}


def _text(text: str) -> str:
    """Replace NUL characters, which PostgreSQL cannot store."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")


def _present(value: V | None) -> V:
    assert value is not None, "the table's constraints forbid it"
    return value
