"""Conversion of rows to values and back."""

from dataclasses import fields
from typing import Any, Literal, TypeVar, cast

from sqlalchemy import inspect

from storage.database.tables import (
    ABANDONED,
    RUNNING,
    AttemptRow,
    Base,
    BestPlanRow,
    DataProfileRow,
    HardwareRow,
    LaunchRow,
    LayerProfileRow,
    ModelRow,
    OutcomeRow,
    PlanRow,
    StageMeasurementRow,
    StudyRow,
    TrialRow,
    WorkloadRow,
)
from storage.errors import NotStorable
from storage.records import (
    AbandonedTrial,
    Baseline,
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
)
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


def columns(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, which are also the names of its columns."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def row_values(row: Base) -> dict[str, Any]:
    """Return the values of a row by the names of its columns."""
    return {column.key: getattr(row, column.key) for column in inspect(type(row)).columns}


def workload_row(value: Workload) -> WorkloadRow:
    return WorkloadRow(
        fingerprint=value.fingerprint,
        hardware_fingerprint=value.hardware.fingerprint,
        model_fingerprint=value.model.fingerprint,
        data_fingerprint=value.data.fingerprint,
        oversize=value.oversize,
        global_batch_samples=value.global_batch_samples,
        memory_limit_bytes=value.memory_limit_bytes,
        **columns(value.software),
    )


def hardware(row: HardwareRow) -> Hardware:
    return _value(Hardware, row)


def model(row: ModelRow) -> ModelShape:
    return _value(ModelShape, row)


def data(row: DataProfileRow) -> DataProfile:
    return _value(DataProfile, row, histogram=histogram(row.histogram))


def histogram(buckets: list[list[int]]) -> Histogram:
    return tuple(cast(tuple[int, int, int], tuple(bucket)) for bucket in buckets)


def workload(row: WorkloadRow) -> Workload:
    return Workload(
        model=model(row.model),
        data=data(row.data),
        hardware=hardware(row.hardware),
        software=_value(Software, row),
        oversize=row.oversize,
        global_batch_samples=row.global_batch_samples,
        memory_limit_bytes=row.memory_limit_bytes,
    )


def layer_profile(row: LayerProfileRow, of_hardware: HardwareRow, of_model: ModelRow) -> LayerProfile:
    given = {"hardware": hardware(of_hardware), "model": model(of_model), "software": _value(Software, row)}
    return _value(LayerProfile, row, **given)


def study(row: StudyRow, imported_from: str | None = None) -> StudyRecord:
    return _value(StudyRecord, row, imported_from=imported_from)


def plan_row(value: Plan) -> PlanRow:
    packed = value.packing if isinstance(value.packing, Packed) else None
    return PlanRow(
        id=value.id,
        document=value.document,
        qv=packed and packed.qv,
        qt=packed and packed.qt,
        **columns(value.layout),
    )


def plan(row: PlanRow) -> Plan:
    return wire.decode(Plan, row.document)


def outcome(row: OutcomeRow) -> Outcome:
    return outcome_of(row.document)


def outcome_of(document: str) -> Outcome:
    found: Outcome = wire.decode(Outcome, document)
    return found


def outcome_row(result: TrialResult) -> OutcomeRow:
    return OutcomeRow(
        trial_id=result.trial_id,
        kind=result.outcome.kind,
        epoch_seconds=result.epoch_seconds,
        epoch_seconds_error=result.epoch_seconds_error,
        contamination=result.contamination,
        energy_joules=result.energy_joules,
        seconds=result.seconds,
        document=_encoded(result.outcome, Outcome),
        **queried(result.outcome),
    )


def attempt_rows(result: TrialResult) -> list[AttemptRow]:
    return [
        AttemptRow(
            trial_id=result.trial_id,
            number=number,
            kind=run.outcome.kind,
            epoch_seconds=run.epoch_seconds,
            contamination=run.contamination,
            document=_encoded(run.outcome, Outcome),
        )
        for number, run in enumerate(result.disturbed)
    ]


def stage_rows(trial_id: str, outcome: Outcome) -> list[StageMeasurementRow]:
    if not isinstance(outcome, Completed):
        return []
    stages = enumerate(outcome.measurement.stages)
    return [StageMeasurementRow(trial_id=trial_id, rank=rank, **columns(stage)) for rank, stage in stages]


def trial(row: TrialRow) -> RunningTrial | AbandonedTrial | FinishedTrial:
    common: dict[str, Any] = {
        "id": row.id,
        "study_id": row.study_id,
        "number": row.number,
        "plan": plan(row.plan),
        "role": row.role,
        "parameters": row.parameters,
        "started": row.started,
        "agent_id": row.agent_id,
    }
    if row.status == RUNNING:
        return RunningTrial(**common)
    if row.status == ABANDONED:
        return AbandonedTrial(**common, abandoned=_present(row.finished))
    return FinishedTrial(**common, result=result(row, _present(row.outcome)), given_up=row.given_up)


def result(row: TrialRow, counts: OutcomeRow) -> TrialResult:
    return TrialResult(
        trial_id=row.id,
        outcome=outcome(counts),
        epoch_seconds=counts.epoch_seconds,
        epoch_seconds_error=counts.epoch_seconds_error,
        finished=_present(row.finished),
        contamination=counts.contamination,
        energy_joules=counts.energy_joules,
        seconds=counts.seconds,
        disturbed=tuple(
            DisturbedRun(
                outcome=outcome_of(run.document),
                epoch_seconds=run.epoch_seconds,
                contamination=run.contamination,
            )
            for run in row.attempts
        ),
    )


def best_plan_row(value: BestPlan) -> BestPlanRow:
    documents = {name: _encoded(getattr(value, name), kind) for name, kind in _DOCUMENTS.items()}
    replaced = {"plan", "workload", "imported_from", *documents}
    kept = {name: column for name, column in columns(value).items() if name not in replaced}
    return BestPlanRow(plan_id=value.plan.id, workload_fingerprint=value.workload.fingerprint, **documents, **kept)


def best_plan(row: BestPlanRow, imported_from: str | None) -> BestPlan:
    documents = {name: wire.decode(kind, getattr(row, name)) for name, kind in _DOCUMENTS.items()}
    given = {"plan": plan(row.plan), "workload": workload(row.workload), "imported_from": imported_from}
    return _value(BestPlan, row, **given, **documents)


def launch(row: LaunchRow) -> LaunchRecord:
    ended = None if row.status == RUNNING else launch_result(row)
    return _value(LaunchRecord, row, result=ended)


def launch_result(row: LaunchRow) -> LaunchResult:
    status = cast(Literal["finished", "failed", "interrupted"], row.status)
    return _value(LaunchResult, row, launch_id=row.id, status=status)


def _encoded(value: object, kind: Any = None) -> str:
    try:
        return wire.encode(value, kind)
    except WireError as error:
        raise NotStorable(f"nothing was stored: {error}") from error


def _value(kind: type[V], row: Base, **given: object) -> V:
    names = (field.name for field in fields(cast(Any, kind)))
    return kind(**{name: given[name] if name in given else getattr(row, name) for name in names})


def queried(outcome: Outcome) -> dict[str, Any]:
    """Return the parts of the document that have columns of their own, so that queries can use them."""
    if isinstance(outcome, Completed):
        measurement = outcome.measurement
        return {"samples_per_second": measurement.measured_samples_per_second, "peak_bytes": measurement.peak_bytes}
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
