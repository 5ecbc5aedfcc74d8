"""Makes a damaged database whole again: what can be read is kept, what contradicts itself is dropped or derived anew.

Nothing is overwritten before a copy of everything lies beside it.
"""

import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, Table, delete, inspect, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from storage import codec, schema, url
from storage.backup import back_up, stamp, sync
from storage.engine import LOCK_TIMEOUT_SECONDS, Database
from storage.errors import DatabaseDamaged, DatabaseUnavailable
from storage.health import ROW_CHECKS, UNREADABLE, problem_of
from storage.tables import (
    ABANDONED,
    FINISHED,
    AgentRow,
    Base,
    BestPlanRow,
    LeaseRow,
    ProvenanceRow,
    StageMeasurementRow,
    StudyRow,
    TrialRow,
    UtcDateTime,
)

_ROWS = "SELECT rowid, * FROM {} WHERE rowid > ? ORDER BY rowid"
_FARTHEST = 1 << 40
"""Row ids above this are not looked for behind a damaged page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """What a repair did."""

    kept_as: str
    """Where the database is as it was before, in words."""
    read: Mapping[str, int]
    """Rows by table that could be read; empty where the server reads them."""
    dropped: Mapping[str, int]
    """Rows by table that were read, and refer to nothing or make no sense."""


def repair(database_url: str | None = None, *, lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS) -> Repaired:
    """Mends the tables in place; a SQLite file is written anew from what can be read of it. Nobody else may use it.

    Optuna's tables of such a file are left behind: the next search fills them again from ours. Raises DatabaseDamaged,
    with everything as it was, when none of our tables can be read; BadUrl, DatabaseUnavailable and DatabaseTooNew.
    """
    url_ = url.parse(url.default_url() if database_url is None else database_url)
    path = url.sqlite_path(url_)
    if path is not None and not path.exists():
        raise DatabaseUnavailable(f"there is no database {url.masked(url_)} to repair; name one with --db")
    database = Database(url_, lock_timeout_seconds)
    try:
        with schema.lock(database):
            return _repair_server(database) if path is None else _repair_file(database, path)
    finally:
        database.close()


def _repair_server(database: Database) -> Repaired:
    schema.check_known(database)
    with database.session(write=True) as session:
        kept_as = back_up(session, "repair")
        return Repaired(kept_as=kept_as, read={}, dropped=_mend(session))


def _repair_file(database: Database, path: Path) -> Repaired:
    with suppress(DatabaseUnavailable):  # where not even the version can be read, nothing says that it is newer
        schema.check_known(database)
    database.close()
    kept = path.with_name(f"{path.name}.damaged-{stamp()}")
    made = path.with_name(f"{path.name}.repaired")
    with database.errors():
        for ending in ("", "-wal"):
            if (source := Path(f"{path}{ending}")).exists():
                shutil.copy2(source, f"{kept}{ending}")
                sync(Path(f"{kept}{ending}"), kept.parent)
        made.unlink(missing_ok=True)
    try:
        read, dropped = _rebuild(database, kept, made)
        with database.errors():
            for ending in ("-wal", "-shm"):  # first: the new file must never meet the old one's log
                Path(f"{path}{ending}").unlink(missing_ok=True)
            sync(made, path.parent)
            made.replace(path)
            sync(path.parent)
    finally:
        for ending in ("", "-wal", "-shm", ".lock"):
            Path(f"{made}{ending}").unlink(missing_ok=True)
    return Repaired(kept_as=str(kept), read=read, dropped=dropped)


def _rebuild(database: Database, kept: Path, made: Path) -> tuple[Counter[str], Counter[str]]:
    read, dropped = Counter[str](), Counter[str]()
    new = Database(url.parse(f"sqlite:///{made}"), database.lock_timeout_seconds)
    try:
        schema.prepare(new)
        with closing(sqlite3.connect(kept)) as old, new.session(write=True) as session:
            old.text_factory = lambda raw: raw.decode(errors="replace")
            tables = [table for table in Base.metadata.sorted_tables if _is_there(old, table)]
            if not tables:
                raise DatabaseDamaged(
                    f"nothing can be read of {url.masked(database.url)}, which stays as it is; restore it from a "
                    "backup, or move it away to begin anew"
                )
            for table in tables:
                for row in _rows(old, table):
                    read[table.name] += 1
                    dropped[table.name] += not _inserted(session, table, row)
            dropped.update(_mend(session))
        with new.errors(), new.engine.connect() as connection:
            connection.connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        new.close()
    return read, +dropped


def _is_there(old: sqlite3.Connection, table: Table) -> bool:
    try:
        old.execute(_ROWS.format(table.name), (0,)).close()
    except sqlite3.Error:
        return False
    return True


def _rows(old: sqlite3.Connection, table: Table) -> Iterator[dict[str, Any]]:
    """What can be read of a table, of which some pages may be lost."""
    last, step = -1, 1
    while step < _FARTHEST:
        try:
            cursor = old.execute(_ROWS.format(table.name), (last,))
            names = [column[0] for column in cursor.description[1:]]
            for rowid, *values in cursor:
                last, step = rowid, 1
                yield dict(zip(names, values, strict=True))
        except sqlite3.Error:  # beyond the damage, perhaps, others can be read
            last, step = last + step, step * 2
        else:
            return


def _inserted(session: Session, table: Table, row: Mapping[str, Any]) -> bool:
    """Whether the row could be stored: it has the columns, values of their types, and what it refers to is there."""
    try:
        values = {column.name: _value(column.type, row[column.name]) for column in table.columns if column.name in row}
        with session.begin_nested():
            session.execute(table.insert().values(values))
    except (IntegrityError, *UNREADABLE):
        return False
    return True


def _value(kind: Any, value: Any) -> Any:
    """As the tables' types read it. Raises ValueError or TypeError."""
    if value is None:
        return None
    if isinstance(kind, UtcDateTime):
        return datetime.fromisoformat(value).replace(tzinfo=UTC)
    if isinstance(kind, JSON):
        return json.loads(value)
    return kind.python_type(value)


def _mend(session: Session) -> Counter[str]:
    """Leaves only rows that make sense; how many of each table were dropped for that."""
    dropped = Counter[str]()
    for kind, check in ROW_CHECKS.items():
        if kind is TrialRow:
            continue
        for key in _bad_keys(session, kind, check):
            dropped += _drop(session, kind, key)
    for trial in session.scalars(select(TrialRow)).all():
        _mend_trial(session, trial)
    session.flush()
    for key in _bad_keys(session, TrialRow, ROW_CHECKS[TrialRow]):
        dropped += _drop(session, TrialRow, key)
    for study in session.scalars(select(StudyRow)).all():
        _mend_study(session, study)
    ended = select(AgentRow.id).where(AgentRow.ended.is_not(None))
    session.execute(delete(LeaseRow).where(LeaseRow.agent_id.in_(ended)))
    session.execute(delete(ProvenanceRow).where(ProvenanceRow.kind.not_in(list(Base.metadata.tables))))
    return dropped


def _bad_keys(session: Session, kind: type[Base], check: Any) -> list[tuple[Any, ...]]:
    found = []
    for key in session.execute(select(*inspect(kind).primary_key)).all():
        try:
            row = session.get(kind, tuple(key))
            is_bad = row is None or problem_of(row, check) is not None
        except UNREADABLE:
            is_bad = True
        if is_bad:
            found.append(tuple(key))
    return found


def _drop(session: Session, kind: type[Base], key: tuple[Any, ...]) -> Counter[str]:
    """Deletes a row and all that refer to it; how many there were, by table."""
    session.expire_all()
    dropped = Counter({kind.__tablename__: 1})
    for mapper in Base.registry.mappers:
        for column in mapper.columns:
            if all(reference.column.table.name != kind.__tablename__ for reference in column.foreign_keys):
                continue
            owners = select(*mapper.primary_key).where(column == key[0])
            for owner in session.execute(owners).all():
                dropped += _drop(session, mapper.class_, tuple(owner))
    matches = (column == value for column, value in zip(inspect(kind).primary_key, key, strict=True))
    session.execute(delete(kind).where(*matches))
    return dropped


def _mend_trial(session: Session, trial: TrialRow) -> None:
    """Its state follows from its outcome, and its ranks' measurements from the outcome's document."""
    if trial.outcome is None:
        if trial.status == FINISHED:
            trial.status = ABANDONED
        return
    trial.status, trial.finished = FINISHED, trial.finished or trial.started
    session.execute(delete(StageMeasurementRow).where(StageMeasurementRow.trial_id == trial.id))
    session.add_all(codec.stage_rows(trial.id, codec.outcome(trial.outcome)))


def _mend_study(session: Session, study: StudyRow) -> None:
    """Its trials are numbered without gaps, and it has ended when it has a winner."""
    trials = session.scalars(select(TrialRow).where(TrialRow.study_id == study.id).order_by(TrialRow.number)).all()
    for number, trial in enumerate(trials):
        if trial.number != number:
            trial.number = number
            session.flush()  # one after the other: two of one number are refused
    best = session.get(BestPlanRow, study.id)
    if best is None:
        study.finished = study.lessons = study.leader_id = None
    elif study.finished is None:
        study.finished = best.created
