"""Consistency checks of the tables, row by row."""

import math
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Select, Table, exists, func, or_, select, text

from storage.annotation import checked_note, checked_tag
from storage.database import rows
from storage.database.engine import UNREADABLE
from storage.database.rows import Row
from storage.database.tables import (
    AGENT,
    ATTEMPT,
    BEST_PLAN,
    DATA_PROFILE,
    DELETED,
    FINISHED,
    HARDWARE,
    LAUNCH,
    LAUNCH_WINDOW,
    LAYER_PROFILE,
    LEASE,
    METADATA,
    MODEL,
    NOTE,
    OUTCOME,
    PLAN,
    PROVENANCE,
    STAGE_MEASUREMENT,
    STUDY,
    TAG,
    TRIAL,
    WORKLOAD,
)
from storage.errors import BadAnnotation
from storage.queries import codec
from storage.queries.studies import whole_trials
from trials import wire
from trials.costs.layer_costs import LayerCosts
from trials.errors import OtherForm
from trials.outcome import Completed

# A choice: rows of documents of some KiB, so that a large database is never in memory as a whole.
_ROWS_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """A row or file content that no version of this software writes."""

    table: str
    key: str
    """Primary key of the row; empty if the problem concerns no single row."""
    what: str

    def __str__(self) -> str:
        return f"{self.table} {self.key}: {self.what}".replace(" :", ":")


def problems(connection: Connection) -> Iterator[Damage]:
    """Yield all problems in the order of the tables, by reading the whole database."""
    # PostgreSQL keeps references itself, and checks its pages with tools of its own.
    if connection.dialect.name == "sqlite":
        yield from _problems_of_file(connection)
    for table in ROW_CHECKS:
        yield from _problems_of_table(connection, table)
    yield from problems_of_studies(connection)
    held = select(LEASE.c.resource).join(AGENT).where(AGENT.c.ended.is_not(None))
    for resource in connection.scalars(held):
        yield Damage(table=LEASE.name, key=resource, what="is held by an agent that has ended")
    for table in (PROVENANCE, DELETED):
        for row in connection.execute(select(table).execution_options(yield_per=_ROWS_AT_ONCE)):
            if row.kind not in METADATA.tables:
                yield Damage(table=table.name, key=f"{row.kind}/{row.key}", what="names no table")
    for table, key in lost_annotations(connection):
        yield Damage(table=table.name, key=rows.text_of(key), what="is of no stored study or plan")


def lost_annotations(connection: Connection) -> Iterator[tuple[Table, tuple[Any, ...]]]:
    """Yield (table, primary key) of the notes and tags of missing studies and plans."""
    for table in (NOTE, TAG):
        here = ((table.c.kind == of.name) & exists().where(of.c.id == table.c.key) for of in (STUDY, PLAN))
        for key in connection.execute(select(*table.primary_key).where(~or_(*here))).all():
            yield table, tuple(key)


def _problems_of_table(connection: Connection, table: Table) -> list[Damage]:
    try:
        query = rows.whole(table).execution_options(yield_per=_ROWS_AT_ONCE)
        checked = ((rows.key_of(table, row), problem_of(table, row)) for row in read(connection, table, query))
        # A list, so that a row that cannot be read ends the whole query here and not at the caller.
        found = [(key, what) for key, what in checked if what is not None]
    except UNREADABLE:  # read row by row to find which
        found = list(bad_rows(connection, table))
    return [Damage(table=table.name, key=rows.text_of(key), what=what) for key, what in found]


def read(connection: Connection, table: Table, query: Select[Any]) -> Iterator[Row]:
    """Yield the rows of a query for whole rows of the table, as their checks need them."""
    return whole_trials(connection, query) if table is TRIAL else iter(connection.execute(query).mappings())


def bad_rows(connection: Connection, table: Table) -> Iterator[tuple[tuple[Any, ...], str]]:
    """Yield (primary key, what is wrong) of each bad row of a table, including unreadable ones."""
    for key in map(tuple, connection.execute(select(*table.primary_key)).all()):
        try:
            row = next(read(connection, table, rows.whole(table).where(rows.has_key(table, key))), None)
            what = "cannot be read" if row is None else problem_of(table, row)
        except UNREADABLE as error:
            what = f"cannot be read: {error}"
        if what is not None:
            yield key, what


def problem_of(table: Table, row: Row) -> str | None:
    """Return what is wrong with one row on its own, or None."""
    check = ROW_CHECKS.get(table)
    for column in table.columns:
        if isinstance(row[column], float) and not math.isfinite(row[column]):
            return f"{column.name} is {row[column]}"
    try:
        return None if check is None else check(row)
    except UNREADABLE as error:
        return f"cannot be read: {error}"


def _problems_of_file(connection: Connection) -> Iterator[Damage]:
    """Check the pages, indices and references of SQLite."""
    for line in connection.scalars(text("PRAGMA integrity_check")):
        if line != "ok":
            yield Damage(table="the file", key="", what=str(line))
    for table, row, parent, _ in connection.execute(text("PRAGMA foreign_key_check")):
        # Optuna keeps its own tables in the same file.
        if table.startswith("autotune_"):
            yield Damage(table=table, key=f"row {row}", what=f"refers to a row of {parent} that is not there")


def _hardware(row: Row) -> str | None:
    return _digest(row[HARDWARE.c.fingerprint], codec.hardware(row).fingerprint)


def _model(row: Row) -> str | None:
    return _digest(row[MODEL.c.fingerprint], codec.model(row).fingerprint)


def _data(row: Row) -> str | None:
    return _digest(row[DATA_PROFILE.c.fingerprint], codec.data(row).fingerprint)


def _workload(row: Row) -> str | None:
    return _digest(row[WORKLOAD.c.fingerprint], codec.workload(row).fingerprint)


def _plan(row: Row) -> str | None:
    found = codec.plan(row)
    columns = codec.plan_row(found)
    names = ("pipeline", "data", "zero", "tensor", "qv", "qt")
    wrong = [name for name in names if row[PLAN.c[name]] != columns[name]]
    return _digest(row[PLAN.c.id], found.id) or (f"{', '.join(wrong)} contradict its document" if wrong else None)


def _digest(key: str, found: str) -> str | None:
    return None if key == found else f"its content is that of {found}"


def _attempt(row: Row) -> str | None:
    kind = codec.outcome_of(row[ATTEMPT.c.document]).kind
    return None if row[ATTEMPT.c.kind] == kind else "kind contradicts its document"


def _trial(row: Row) -> str | None:
    status, has_outcome = row[TRIAL.c.status], row[OUTCOME.c.trial_id] is not None
    if (status == FINISHED) != has_outcome:
        return f"is {status} with{'' if has_outcome else 'out'} an outcome"
    codec.trial(row)
    return None


def _outcome(row: Row) -> str | None:
    found = codec.outcome_of(row[OUTCOME.c.document])
    wrong = [name for name, value in codec.queried(found).items() if row[OUTCOME.c[name]] != value]
    if row[OUTCOME.c.kind] != found.kind:
        wrong.append("kind")
    return f"{', '.join(wrong)} contradict its document" if wrong else None


def _study(row: Row) -> str | None:
    codec.study(row)
    return None


def _best_plan(row: Row) -> str | None:
    seconds = codec.best_plan(row).epoch_seconds
    return None if seconds > 0 else f"an epoch takes {seconds} s"


def _layer_profile(row: Row) -> str | None:
    with suppress(OtherForm):  # of another version: it is never used, the layers are profiled again
        wire.decode(LayerCosts, row[LAYER_PROFILE.c.document])
    return None


def _launch(row: Row) -> str | None:
    codec.launch(row)
    return None


def _launch_window(row: Row) -> str | None:
    codec.window(row)
    return None


def _note(row: Row) -> str | None:
    return _annotation(row[NOTE.c.text], checked_note)


def _tag(row: Row) -> str | None:
    return _annotation(row[TAG.c.tag], checked_tag)


def _annotation(text: str, checked: Callable[[str], str]) -> str | None:
    try:
        return None if checked(text) == text else "is not in the form in which it is stored"
    except BadAnnotation as error:
        return str(error)


ROW_CHECKS: dict[Table, Callable[[Any], str | None]] = {
    HARDWARE: _hardware,
    MODEL: _model,
    DATA_PROFILE: _data,
    WORKLOAD: _workload,
    PLAN: _plan,
    LAYER_PROFILE: _layer_profile,
    STUDY: _study,
    ATTEMPT: _attempt,
    TRIAL: _trial,
    OUTCOME: _outcome,
    BEST_PLAN: _best_plan,
    LAUNCH: _launch,
    LAUNCH_WINDOW: _launch_window,
    NOTE: _note,
    TAG: _tag,
}


def problems_of_studies(connection: Connection, ids: Collection[str] | None = None) -> Iterator[Damage]:
    """Yield the contradictions between rows of all studies, or of the studies with the given ids."""
    these = () if ids is None else (STUDY.c.id.in_(ids),)
    counted = select(STUDY.c.id, func.count(), func.min(TRIAL.c.number), func.max(TRIAL.c.number))
    counted = counted.join(TRIAL, TRIAL.c.study_id == STUDY.c.id).where(*these).group_by(STUDY.c.id)
    for study, count, first, last in connection.execute(counted):
        if (first, last) != (0, count - 1):
            what = f"its {count} trials have the numbers {first} to {last}"
            yield Damage(table=STUDY.name, key=study, what=what)
    won = select(STUDY.c.id, STUDY.c.finished.is_(None), STUDY.c.workload_fingerprint, BEST_PLAN.c.workload_fingerprint)
    won = won.outerjoin(BEST_PLAN, BEST_PLAN.c.study_id == STUDY.c.id).where(*these)
    for study, is_open, workload, winners in connection.execute(won):
        if (end := _problem_of_end(workload, winners, is_open=is_open)) is not None:
            yield Damage(table=STUDY.name, key=study, what=end)
    ranks = select(OUTCOME.c.trial_id, OUTCOME.c.document, func.count(STAGE_MEASUREMENT.c.rank))
    ranks = ranks.join(TRIAL, TRIAL.c.id == OUTCOME.c.trial_id).join(STUDY, STUDY.c.id == TRIAL.c.study_id)
    ranks = ranks.outerjoin(STAGE_MEASUREMENT, STAGE_MEASUREMENT.c.trial_id == OUTCOME.c.trial_id)
    ranks = ranks.where(OUTCOME.c.kind == "completed", *these).group_by(OUTCOME.c.trial_id, OUTCOME.c.document)
    for trial, document, count in connection.execute(ranks.execution_options(yield_per=_ROWS_AT_ONCE)):
        if wrong := _problem_of_ranks(document, count):
            yield Damage(table=STAGE_MEASUREMENT.name, key=trial, what=wrong)


def _problem_of_end(workload: str, winners: str | None, *, is_open: bool) -> str | None:
    """Return what is wrong with a study's end; `winners` is the workload of its winner, if it has one."""
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
