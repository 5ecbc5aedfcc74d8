"""Repair of a damaged database: readable rows are kept, contradictory ones dropped or derived again.

Nothing is overwritten before a copy of the whole database is on disk.
"""

import json
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import JSON, Table, delete, inspect, select, text
from sqlalchemy.exc import IntegrityError, StatementError
from sqlalchemy.orm import Session

from storage.database import url
from storage.database.engine import LOCK_TIMEOUT_SECONDS, UNREADABLE, Database
from storage.database.tables import (
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
from storage.errors import DatabaseDamaged, DatabaseUnavailable
from storage.migrations.versions import r0003_models
from storage.queries import codec
from storage.upkeep import schema
from storage.upkeep.backup import back_up, stamp
from storage.upkeep.health import ROW_CHECKS, bad_rows
from trials.whole_file import sync

_UNREADABLE_PAGE = (sqlite3.Error, UnicodeDecodeError)
"""UnicodeDecodeError comes where SQLite quotes damaged text in its message."""
_LOGS = ("", "-wal", "-journal", "-shm")
"""Endings of a file and of what SQLite keeps beside it."""
_NEVER = datetime.fromtimestamp(0, UTC)
_FARTHEST = 1 << 40
"""Row ids above this are not looked for behind a damaged page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repaired:
    """Summary of a repair."""

    kept_as: str
    """Where the copy of the unrepaired database is, for messages."""
    read: Mapping[str, int]
    """Readable rows by table; empty for PostgreSQL, where nothing is rebuilt."""
    dropped: Mapping[str, int]
    """Readable rows by table that had missing references or contradictory values."""


def repair(
    database_url: str | None = None,
    *,
    check: Callable[[], None] = lambda: None,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> Repaired:
    """Repair the tables in place; rebuild a SQLite file from its readable rows.

    Repair requires exclusive access: `check` is called once the copy exists, and must raise while another process uses
    the database. A rebuilt file has no tables of Optuna: the next search restores them. Raises BadUrl,
    DatabaseUnavailable, DatabaseTooNew, and DatabaseDamaged, with nothing changed, if no table of autotune is readable.
    """
    parsed = url.parse(url.default_url() if database_url is None else database_url)
    path = url.sqlite_path(parsed)
    database = Database(parsed, lock_timeout_seconds)
    try:
        if path is not None:
            with database.errors():
                is_there = path.exists()
            if not is_there:
                raise DatabaseUnavailable(f"there is no database {url.masked(parsed)} to repair; name one with --db")
            return _repair_file(database, path, check)
        check()
        with schema.lock(database):
            return _repair_server(database)
    finally:
        database.close()


def _repair_server(database: Database) -> Repaired:
    schema.check_known(database)
    with database.session(write=True) as session:
        there = inspect(session.connection()).get_table_names()
        names = ", ".join(table.name for table in Base.metadata.sorted_tables if table.name in there)
        session.execute(text(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE"))
        kept_as = back_up(session, "repair")
        schema.upgrade(session)
        return Repaired(kept_as=kept_as, read={}, dropped=_mend(session))


def _repair_file(database: Database, path: Path, check: Callable[[], None]) -> Repaired:
    kept = path.with_name(f"{path.name}.before-repair-{stamp()}")
    made, work = path.with_name(f"{path.name}.repaired"), path.with_name(f"{path.name}.read")
    is_replaced = False
    try:
        with database.errors():
            _copy(path, kept)  # before anyone opens the file, which may bring its log into it
        with suppress(DatabaseUnavailable):  # where not even the version can be read, nothing says that it is newer
            schema.check_known(database)
        check()
        with schema.lock(database):
            database.close()
            with database.errors():
                _remove(made, _LOGS)
                before = _state(path)
                _copy(path, work)
            read, dropped = _rebuild(database, work, made)
            with database.errors(), _without_writers(path):
                if _state(path) != before:
                    raise DatabaseUnavailable(
                        f"{url.masked(database.url)} was written to during the repair and was left unchanged; "
                        "end the processes that use it, then repair it again"
                    )
                _remove(path, _LOGS[1:])  # first: the new file must never meet the old one's log
                shutil.copymode(path, made)
                sync(made, path.parent)
                made.replace(path)
                is_replaced = True
                sync(path.parent)
    finally:
        for each in (made, work, *(() if is_replaced else (kept,))):
            _remove(each, (*_LOGS, ".lock"))
    return Repaired(kept_as=str(kept), read=read, dropped=dropped)


def _state(path: Path) -> list[tuple[int, int]]:
    """A value that changes with every write to the file or its log; an empty log counts as none."""
    files = [file for ending in _LOGS[:-1] if (file := Path(f"{path}{ending}")).exists()]
    return [(found.st_mtime_ns, found.st_size) for found in map(Path.stat, files) if found.st_size]


@contextmanager
def _without_writers(path: Path) -> Iterator[None]:
    """Hold the write lock. Where damage makes it impossible to take, no other process can take it either."""
    with closing(sqlite3.connect(path, LOCK_TIMEOUT_SECONDS, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except _UNREADABLE_PAGE as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                raise
        yield


def _copy(source: Path, target: Path) -> None:
    """Copy a database with its log and journal, and sync the copies to disk."""
    for ending in _LOGS[:-1]:
        if Path(f"{source}{ending}").exists():
            shutil.copy2(f"{source}{ending}", f"{target}{ending}")
            sync(Path(f"{target}{ending}"), target.parent)


def _remove(path: Path, endings: Sequence[str]) -> None:
    for ending in endings:
        Path(f"{path}{ending}").unlink(missing_ok=True)


def _rebuild(database: Database, kept: Path, made: Path) -> tuple[Counter[str], Counter[str]]:
    read, dropped = Counter[str](), Counter[str]()
    new = Database(url.parse(url.of_file(made)), database.lock_timeout_seconds)
    try:
        schema.prepare(new)
        with closing(sqlite3.connect(kept)) as old, new.session(write=True) as session:
            # Python would refuse a whole row for one damaged byte of text.
            old.text_factory = lambda raw: raw.decode(errors="replace")
            tables = [table for table in Base.metadata.sorted_tables if _is_there(old, table)]
            if not tables:
                raise DatabaseDamaged(
                    f"nothing can be read of {url.masked(database.url)}, which is left unchanged; restore it "
                    "from a backup, or move it away to start a new one"
                )
            for table in tables:
                for row in _rows(old, table):
                    read[table.name] += 1
                    dropped[table.name] += not _inserted(session, table, row)
            r0003_models.rekey(session.connection(), Base.metadata.tables)  # rows that an older version wrote
            dropped.update(_mend(session))
        with new.errors(), new.engine.connect() as connection:
            # The file is moved without its log.
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
    """Yield the readable rows of a table that may have lost pages.

    Each row has its own query: a cursor that meets a lost page also loses the row before it.
    """
    last, step = -1, 1
    while step < _FARTHEST:
        try:
            found = _row(old, table, last)
        except _UNREADABLE_PAGE:  # beyond the damage, perhaps, others can be read
            last, step = last + step, step * 2  # a lost page may hold thousands of row ids
            continue
        number, row = found or (_FARTHEST, {})
        if step > 1:  # those between the damage and here, which the last leap has missed
            yield from _backwards(old, table, number, last - step // 2)
        if found is None:
            return
        yield row
        last, step = number, 1


def _backwards(old: sqlite3.Connection, table: Table, before: int, until: int) -> Iterator[dict[str, Any]]:
    with suppress(*_UNREADABLE_PAGE):
        while (found := _row(old, table, before, backwards=True)) is not None and found[0] > until:
            before, row = found
            yield row


def _row(
    old: sqlite3.Connection, table: Table, rowid: int, *, backwards: bool = False
) -> tuple[int, dict[str, Any]] | None:
    """Return the next row with its id. Raises sqlite3.Error for a lost page, or one of another table."""
    where = "< ? ORDER BY rowid DESC" if backwards else "> ? ORDER BY rowid"
    query = f"SELECT rowid, * FROM {table.name} WHERE rowid {where} LIMIT 1"  # noqa: S608  # a name of ours
    cursor = old.execute(query, (rowid,))
    found = cursor.fetchone()
    if found is None:
        return None
    if found[0] == rowid or (found[0] < rowid) != backwards:
        raise sqlite3.DatabaseError(f"the rows of {table.name} are out of order")
    names = [column[0] for column in cursor.description[1:]]
    return found[0], dict(zip(names, found[1:], strict=True))


def _inserted(session: Session, table: Table, row: Mapping[str, Any]) -> bool:
    """Insert the row, and return whether its columns, value types and references are valid."""
    try:
        values = {column.name: _value(column.type, row[column.name]) for column in table.columns if column.name in row}
    except UNREADABLE:
        return False
    if any(_stored(session, table, reading) for reading in _readings(table, values)):
        return True
    if table.name == ProvenanceRow.__tablename__:  # what came from elsewhere must not look like ours
        lost = {"source": "a bundle that was lost", "exported": _NEVER, "imported": _NEVER}
        _stored(session, inspect(BundleRow).local_table, {"digest": values["bundle_digest"], **lost})
        return _stored(session, table, values)
    return False


def _readings(table: Table, values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the row as it is, then with references to agents cleared, then, for a trial, with a consistent status."""
    yield values
    agents = [key.parent.name for key in table.foreign_keys if key.column.table.name == AgentRow.__tablename__]
    if agents:
        yield (values := {**values, **dict.fromkeys(agents)})
    if table.name == TrialRow.__tablename__:  # whether it is finished will follow from its outcome
        yield {**values, "status": ABANDONED, "finished": values.get("finished") or values.get("started")}


def _stored(session: Session, table: Any, values: Mapping[str, Any]) -> bool:
    try:
        with session.begin_nested():
            session.execute(table.insert().values(values))
    except (IntegrityError, *UNREADABLE):
        return False
    except StatementError as error:
        if not isinstance(error.orig, ValueError):  # a type of column refused it
            raise
        return False
    return True


def _value(kind: Any, value: Any) -> Any:
    """Convert a raw SQLite value to the type of its column. Raises ValueError or TypeError."""
    if value is None:
        return None
    if isinstance(kind, UtcDateTime):
        return datetime.fromisoformat(value).replace(tzinfo=UTC)
    if isinstance(kind, JSON):
        return json.loads(value)
    return kind.python_type(value)


def _mend(session: Session) -> Counter[str]:
    """Drop inconsistent rows, restore derived values, and return the number of dropped rows by table."""
    dropped = Counter[str]()
    for kind in ROW_CHECKS.keys() - {TrialRow}:
        dropped += _without_bad(session, kind)
    for trial in session.scalars(select(TrialRow)).all():
        _mend_trial(session, trial)
    session.flush()
    dropped += _without_bad(session, TrialRow)
    for study in session.scalars(select(StudyRow)).all():
        best = session.get(BestPlanRow, study.id)
        if best is not None and best.workload_fingerprint != study.workload_fingerprint:
            dropped += _drop(session, BestPlanRow, (study.id,))
        _mend_study(session, study)
    ended = select(AgentRow.id).where(AgentRow.ended.is_not(None))
    session.execute(delete(LeaseRow).where(LeaseRow.agent_id.in_(ended)))
    _forget_lost(session)
    return dropped


def _forget_lost(session: Session) -> None:
    """Drop the provenance of missing rows, so that a later import brings them back as new ones."""
    kinds = {mapper.class_.__tablename__: mapper for mapper in Base.registry.mappers}
    for name in session.scalars(select(ProvenanceRow.kind).distinct()).all():
        of_kind = delete(ProvenanceRow).where(ProvenanceRow.kind == name)
        known = session.execute(select(*kinds[name].primary_key)).all() if name in kinds else []
        keys = {"/".join(map(str, key)) for key in known}
        for key in session.scalars(select(ProvenanceRow.key).where(ProvenanceRow.kind == name)).all():
            if key not in keys:
                session.execute(of_kind.where(ProvenanceRow.key == key))


def _without_bad(session: Session, kind: type[Base]) -> Counter[str]:
    dropped = Counter[str]()
    for key, _ in list(bad_rows(session, kind)):
        dropped += _drop(session, kind, key)
    return dropped


def _drop(session: Session, kind: type[Base], key: tuple[Any, ...]) -> Counter[str]:
    """Delete a row and all rows that refer to it, and return their number by table."""
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
    """Derive the status from the outcome, and the measurements of the ranks from its document."""
    if trial.outcome is None:
        if trial.status == FINISHED:
            trial.status = ABANDONED
        return
    trial.status, trial.finished = FINISHED, trial.finished or trial.started
    session.execute(delete(StageMeasurementRow).where(StageMeasurementRow.trial_id == trial.id))
    session.add_all(codec.stage_rows(trial.id, codec.outcome(trial.outcome)))


def _mend_study(session: Session, study: StudyRow) -> None:
    """Number the trials without gaps, and derive the end of the study from its winner."""
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
