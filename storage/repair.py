"""Makes a damaged database whole again: what can be read is kept, what contradicts itself is dropped or derived anew.

Nothing is overwritten before a copy of everything lies beside it.
"""

import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, Table, delete, inspect, select, text
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
    BundleRow,
    LeaseRow,
    ProvenanceRow,
    StageMeasurementRow,
    StudyRow,
    TrialRow,
    UtcDateTime,
)

_UNREADABLE_PAGE = (sqlite3.Error, UnicodeDecodeError)
"""The second when SQLite quotes in its message what is damaged."""
_LOGS = ("", "-wal", "-journal", "-shm")
"""Endings of a file and of what SQLite keeps beside it."""
_NEVER = datetime.fromtimestamp(0, UTC)
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


def repair(
    database_url: str | None = None,
    *,
    check: Callable[[], None] = lambda: None,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> Repaired:
    """Mends the tables in place; a SQLite file is written anew from what can be read of it.

    Nobody else may use it: `check`, which is called when the copy is there, raises when somebody does. Optuna's tables
    of a file are left behind: the next search fills them again from ours. Raises DatabaseDamaged, with everything as it
    was, when none of our tables can be read; BadUrl, DatabaseUnavailable and DatabaseTooNew.
    """
    parsed = url.parse(url.default_url() if database_url is None else database_url)
    path = url.sqlite_path(parsed)
    if path is not None and not path.exists():
        raise DatabaseUnavailable(f"there is no database {url.masked(parsed)} to repair; name one with --db")
    database = Database(parsed, lock_timeout_seconds)
    try:
        if path is not None:
            return _repair_file(database, path, check)
        check()
        with schema.lock(database):
            return _repair_server(database)
    finally:
        database.close()


def _repair_server(database: Database) -> Repaired:
    schema.check_known(database)
    with database.session(write=True) as session:
        names = ", ".join(table.name for table in Base.metadata.sorted_tables)
        session.execute(text(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE"))
        kept_as = back_up(session, "repair")
        return Repaired(kept_as=kept_as, read={}, dropped=_mend(session))


def _repair_file(database: Database, path: Path, check: Callable[[], None]) -> Repaired:
    kept = path.with_name(f"{path.name}.damaged-{stamp()}")
    made, work = path.with_name(f"{path.name}.repaired"), path.with_name(f"{path.name}.read")
    try:
        with database.errors():
            _copy(path, kept)  # before anyone opens the file, which may bring its log into it
        with suppress(DatabaseUnavailable):  # where not even the version can be read, nothing says that it is newer
            schema.check_known(database)
        check()
    except BaseException:
        _remove(kept, _LOGS)
        raise
    try:
        with schema.lock(database):
            database.close()
            with database.errors():
                _remove(made, _LOGS)
                _copy(kept, work)
            read, dropped = _rebuild(database, work, made)
            with database.errors():
                _remove(path, _LOGS[1:])  # first: the new file must never meet the old one's log
                sync(made, path.parent)
                made.replace(path)
                sync(path.parent)
    finally:
        for each in (made, work):
            _remove(each, (*_LOGS, ".lock"))
    return Repaired(kept_as=str(kept), read=read, dropped=dropped)


def _copy(source: Path, target: Path) -> None:
    """With all that SQLite keeps beside it, on disk when it returns."""
    for ending in _LOGS[:-1]:
        if Path(f"{source}{ending}").exists():
            shutil.copy2(f"{source}{ending}", f"{target}{ending}")
            sync(Path(f"{target}{ending}"), target.parent)


def _remove(path: Path, endings: Sequence[str]) -> None:
    for ending in endings:
        Path(f"{path}{ending}").unlink(missing_ok=True)


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
        old.execute(f"SELECT * FROM {table.name} WHERE 0").close()  # noqa: S608  # a name of ours; no page of it is read
    except _UNREADABLE_PAGE:
        return False
    return True


def _rows(old: sqlite3.Connection, table: Table) -> Iterator[dict[str, Any]]:
    """What can be read of a table, of which some pages may be lost.

    One after the other: a cursor that meets a lost page takes the row before it along.
    """
    query = f"SELECT rowid, * FROM {table.name} WHERE rowid > ? ORDER BY rowid LIMIT 1"  # noqa: S608  # a name of ours
    last, step = -1, 1
    while step < _FARTHEST:
        try:
            found = _row(old, query, last)
        except _UNREADABLE_PAGE:  # beyond the damage, perhaps, others can be read
            last, step = last + step, step * 2
            continue
        number, row = found or (_FARTHEST, {})
        if step > 1:  # those between the damage and here, which the last leap has missed
            yield from _backwards(old, table, number, last - step // 2)
        if found is None:
            return
        yield row
        last, step = number, 1


def _backwards(old: sqlite3.Connection, table: Table, before: int, until: int) -> Iterator[dict[str, Any]]:
    query = f"SELECT rowid, * FROM {table.name} WHERE rowid < ? ORDER BY rowid DESC LIMIT 1"  # noqa: S608  # as above
    with suppress(*_UNREADABLE_PAGE):
        while (found := _row(old, query, before)) is not None and found[0] > until:
            before, row = found
            yield row


def _row(old: sqlite3.Connection, query: str, rowid: int) -> tuple[int, dict[str, Any]] | None:
    cursor = old.execute(query, (rowid,))
    found = cursor.fetchone()
    names = [column[0] for column in cursor.description[1:]]
    return None if found is None else (found[0], dict(zip(names, found[1:], strict=True)))


def _inserted(session: Session, table: Table, row: Mapping[str, Any]) -> bool:
    """Whether the row could be stored: it has the columns, values of their types, and what it refers to is there.

    Without the agent or the bundle that it names, of which nothing else is known then.
    """
    try:
        values = {column.name: _value(column.type, row[column.name]) for column in table.columns if column.name in row}
    except UNREADABLE:
        return False
    if _stored(session, table, values):
        return True
    if table.name == ProvenanceRow.__tablename__:  # what came from elsewhere must not look like ours
        lost = {"source": "a bundle that was lost", "exported": _NEVER, "imported": _NEVER}
        _stored(session, inspect(BundleRow).local_table, {"digest": values["bundle_digest"], **lost})
        return _stored(session, table, values)
    agents = [key.parent.name for key in table.foreign_keys if key.column.table.name == AgentRow.__tablename__]
    return bool(agents) and _stored(session, table, {**values, **dict.fromkeys(agents)})


def _stored(session: Session, table: Any, values: Mapping[str, Any]) -> bool:
    try:
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
    _forget_lost(session)
    return dropped


def _forget_lost(session: Session) -> None:
    """Rows that are not there came from nowhere: a later import brings them as new ones."""
    kinds = {mapper.class_.__tablename__: mapper for mapper in Base.registry.mappers}
    for name in session.scalars(select(ProvenanceRow.kind).distinct()).all():
        of_kind = delete(ProvenanceRow).where(ProvenanceRow.kind == name)
        known = session.execute(select(*kinds[name].primary_key)).all() if name in kinds else []
        keys = {"/".join(map(str, key)) for key in known}
        for key in session.scalars(select(ProvenanceRow.key).where(ProvenanceRow.kind == name)).all():
            if key not in keys:
                session.execute(of_kind.where(ProvenanceRow.key == key))


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
    if best is None and study.finished is not None:
        study.finished = study.lessons = study.leader_id = None
    elif best is not None and study.finished is None:
        study.finished = best.created
