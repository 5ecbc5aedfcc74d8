"""Consistency checks of the tables, row by row."""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import func, inspect, select, text
from sqlalchemy.orm import Session

from storage.database.engine import UNREADABLE
from storage.database.tables import (
    FINISHED,
    AgentRow,
    AttemptRow,
    Base,
    BestPlanRow,
    DataProfileRow,
    HardwareRow,
    LaunchRow,
    LayerProfileRow,
    LeaseRow,
    ModelRow,
    OutcomeRow,
    PlanRow,
    ProvenanceRow,
    StageMeasurementRow,
    StudyRow,
    TrialRow,
    WorkloadRow,
)
from storage.queries import codec
from storage.queries.provenance import key_of
from storage.queries.studies import WHOLE_TRIAL
from trials import wire
from trials.errors import OtherForm
from trials.layer_costs import LayerCosts
from trials.outcome import Completed

_ROWS_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A row or file content that no version of this software writes."""

    table: str
    key: str
    """Primary key of the row; empty if the problem concerns no single row."""
    what: str

    def __str__(self) -> str:
        return f"{self.table} {self.key}: {self.what}".replace(" :", ":")


def problems(session: Session) -> Iterator[Problem]:
    """Yield all problems in the order of the tables, by reading the whole database."""
    if session.get_bind().dialect.name == "sqlite":
        yield from _problems_of_file(session)
    for kind in ROW_CHECKS:
        yield from _problems_of_table(session, kind)
    yield from problems_of_studies(session)
    held = select(LeaseRow.resource).join(AgentRow).where(AgentRow.ended.is_not(None))
    for resource in session.scalars(held):
        yield Problem(table=LeaseRow.__tablename__, key=resource, what="is held by an agent that has ended")
    tables = {mapper.class_.__tablename__: mapper.class_ for mapper in Base.registry.mappers}
    for row in session.scalars(select(ProvenanceRow).execution_options(yield_per=_ROWS_AT_ONCE)):
        if row.kind not in tables:
            yield Problem(table=ProvenanceRow.__tablename__, key=f"{row.kind}/{row.key}", what="names no table")


def _problems_of_table(session: Session, kind: type[Base]) -> list[Problem]:
    try:
        query = select(kind).options(*(WHOLE_TRIAL if kind is TrialRow else ()))
        rows = session.scalars(query.execution_options(yield_per=_ROWS_AT_ONCE))
        found = [(key_of(row), what) for row in rows if (what := problem_of(row)) is not None]
    except UNREADABLE:  # read row by row to find which
        found = [("/".join(map(str, key)), what) for key, what in bad_rows(session, kind)]
    return [Problem(table=kind.__tablename__, key=key, what=what) for key, what in found]


def bad_rows(session: Session, kind: type[Base]) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield (primary key, what is wrong) of each bad row of a table, including unreadable ones."""
    for key in map(tuple, session.execute(select(*inspect(kind).primary_key)).all()):
        try:
            row = session.get(kind, key)
            what = "cannot be read" if row is None else problem_of(row)
        except UNREADABLE as error:
            what = f"cannot be read: {error}"
        if what is not None:
            yield key, what


def problem_of(row: Base) -> str | None:
    """Return what is wrong with one row on its own, or None."""
    check = ROW_CHECKS.get(type(row))
    for name, value in codec.row_values(row).items():
        if isinstance(value, float) and not math.isfinite(value):
            return f"{name} is {value}"
    try:
        return None if check is None else check(row)
    except UNREADABLE as error:
        return f"cannot be read: {error}"


def _problems_of_file(session: Session) -> Iterator[Problem]:
    """Check the pages, indices and references of SQLite."""
    for line in session.scalars(text("PRAGMA integrity_check")):
        if line != "ok":
            yield Problem(table="the file", key="", what=str(line))
    for table, row, parent, _ in session.execute(text("PRAGMA foreign_key_check")):
        if table.startswith("autotune_"):
            yield Problem(table=table, key=f"row {row}", what=f"refers to a row of {parent} that is not there")


def _hardware(row: HardwareRow) -> str | None:
    return _digest(row.fingerprint, codec.hardware(row).fingerprint)


def _model(row: ModelRow) -> str | None:
    return _digest(row.fingerprint, codec.model(row).fingerprint)


def _data(row: DataProfileRow) -> str | None:
    return _digest(row.fingerprint, codec.data(row).fingerprint)


def _workload(row: WorkloadRow) -> str | None:
    return _digest(row.fingerprint, codec.workload(row).fingerprint)


def _plan(row: PlanRow) -> str | None:
    found = codec.plan(row)
    columns = codec.plan_row(found)
    names = ("pipeline", "data", "zero", "qv", "qt")
    wrong = [name for name in names if getattr(row, name) != getattr(columns, name)]
    return _digest(row.id, found.id) or (f"{', '.join(wrong)} contradict its document" if wrong else None)


def _digest(key: str, found: str) -> str | None:
    return None if key == found else f"its content is that of {found}"


def _attempt(row: AttemptRow) -> str | None:
    return None if row.kind == codec.outcome_of(row.document).kind else "kind contradicts its document"


def _trial(row: TrialRow) -> str | None:
    if (row.status == FINISHED) != (row.outcome is not None):
        return f"is {row.status} with{'out' if row.outcome is None else ''} an outcome"
    codec.trial(row)
    return None


def _outcome(row: OutcomeRow) -> str | None:
    found = codec.outcome(row)
    wrong = [name for name, value in codec.queried(found).items() if getattr(row, name) != value]
    if row.kind != found.kind:
        wrong.append("kind")
    return f"{', '.join(wrong)} contradict its document" if wrong else None


def _study(row: StudyRow) -> str | None:
    codec.study(row)
    return None


def _best_plan(row: BestPlanRow) -> str | None:
    codec.best_plan(row, None)
    return None if row.epoch_seconds > 0 else f"an epoch takes {row.epoch_seconds} s"


def _layer_profile(row: LayerProfileRow) -> str | None:
    with suppress(OtherForm):  # of another version: it is never used, the layers are profiled again
        wire.decode(LayerCosts, row.document)
    return None


def _launch(row: LaunchRow) -> str | None:
    codec.launch(row)
    return None


ROW_CHECKS: dict[type[Base], Callable[[Any], str | None]] = {
    HardwareRow: _hardware,
    ModelRow: _model,
    DataProfileRow: _data,
    WorkloadRow: _workload,
    PlanRow: _plan,
    LayerProfileRow: _layer_profile,
    StudyRow: _study,
    AttemptRow: _attempt,
    TrialRow: _trial,
    OutcomeRow: _outcome,
    BestPlanRow: _best_plan,
    LaunchRow: _launch,
}


def problems_of_studies(session: Session, ids: Collection[str] | None = None) -> Iterator[Problem]:
    """Yield the contradictions between rows of all studies, or of those with the given ids."""
    these = () if ids is None else (StudyRow.id.in_(ids),)
    counted = select(StudyRow.id, func.count(), func.min(TrialRow.number), func.max(TrialRow.number))
    counted = counted.join(TrialRow, TrialRow.study_id == StudyRow.id).where(*these).group_by(StudyRow.id)
    for study, count, first, last in session.execute(counted):
        if (first, last) != (0, count - 1):
            what = f"its {count} trials have the numbers {first} to {last}"
            yield Problem(table=StudyRow.__tablename__, key=study, what=what)
    won = select(
        StudyRow.id, StudyRow.finished.is_(None), StudyRow.workload_fingerprint, BestPlanRow.workload_fingerprint
    )
    won = won.outerjoin(BestPlanRow, BestPlanRow.study_id == StudyRow.id).where(*these)
    for study, is_open, workload, winners in session.execute(won):
        if (end := _problem_of_end(workload, winners, is_open=is_open)) is not None:
            yield Problem(table=StudyRow.__tablename__, key=study, what=end)
    ranks = select(OutcomeRow.trial_id, OutcomeRow.document, func.count(StageMeasurementRow.rank))
    ranks = ranks.join(TrialRow, TrialRow.id == OutcomeRow.trial_id).join(StudyRow, StudyRow.id == TrialRow.study_id)
    ranks = ranks.outerjoin(StageMeasurementRow, StageMeasurementRow.trial_id == OutcomeRow.trial_id)
    ranks = ranks.where(OutcomeRow.kind == "completed", *these).group_by(OutcomeRow.trial_id, OutcomeRow.document)
    for trial, document, count in session.execute(ranks.execution_options(yield_per=_ROWS_AT_ONCE)):
        if wrong := _problem_of_ranks(document, count):
            yield Problem(table=StageMeasurementRow.__tablename__, key=trial, what=wrong)


def _problem_of_end(workload: str, winners: str | None, *, is_open: bool) -> str | None:
    """`winners` is the workload of the study's winner, if it has one."""
    if winners is None:
        return None if is_open else "has ended without a winner"
    if is_open:
        return "has a winner, but no end"
    return None if winners == workload else f"its winner is of {winners}"


def _problem_of_ranks(document: str, count: int) -> str | None:
    """Compare the number of measured ranks with the outcome."""
    try:
        found = codec.outcome_of(document)
    except UNREADABLE:  # the check of the outcome reports it
        return None
    expected = len(found.measurement.stages) if isinstance(found, Completed) else 0
    return None if count == expected else f"{count} ranks in place of {expected}"
