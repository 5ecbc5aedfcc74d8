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

from sqlalchemy import JSON, Connection, Table, delete, inspect, select, text
from sqlalchemy.exc import IntegrityError, StatementError

from storage.database import rows, url
from storage.database.engine import LOCK_TIMEOUT_SECONDS, UNREADABLE, Database, is_absent
from storage.database.rows import Row
from storage.database.tables import (
    ABANDONED,
    AGENT,
    BEST_PLAN,
    BUNDLE,
    DELETED,
    FINISHED,
    LEASE,
    METADATA,
    OUTCOME,
    PROVENANCE,
    STAGE_MEASUREMENT,
    STUDY,
    TRIAL,
    UtcDateTime,
)
from storage.errors import DatabaseDamaged, DatabaseUnavailable
from storage.queries import codec
from storage.queries.studies import whole_trials
from storage.upkeep import schema
from storage.upkeep.backup import back_up, stamp
from storage.upkeep.health import ROW_CHECKS, bad_rows, lost_annotations
from storage.upkeep.other_tables import copy_others
from trials.whole_file import sync

_UNREADABLE_PAGE = (sqlite3.Error, UnicodeDecodeError)
"""UnicodeDecodeError comes where SQLite quotes damaged text in its message."""
_LOGS = ("", "-wal", "-journal", "-shm")
"""Endings of a file and of those that SQLite keeps next to it."""
_NEVER = datetime.fromtimestamp(0, UTC)
# A choice: no table here counts that far, and a damaged id could send the search to 2^63.
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
    left_out: tuple[str, ...]
    """Tables of other programs, with their views, indexes and triggers, that could not be copied."""


def repair(
    database_url: str | None = None,
    *,
    check: Callable[[], None] = lambda: None,
    lock_timeout_seconds: float = LOCK_TIMEOUT_SECONDS,
) -> Repaired:
    """Repair the tables in place; rebuild a SQLite file from its readable rows.

    Repair requires exclusive access: `check` is called once the copy exists, and must raise while another process uses
    the database. Raise BadUrl, DatabaseUnavailable, OtherVersion, and DatabaseDamaged, with nothing changed, if no
    table of autotune is readable.
    """
    parsed = url.parse(url.default_url() if database_url is None else database_url)
    path = url.sqlite_path(parsed)
    if path is not None and is_absent(path):
        reason = _reason(path)
        raise DatabaseUnavailable(f"there is no database {url.masked(parsed)} to repair{reason}; name one with --db")
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
    with database.transaction(write=True) as connection:
        there = inspect(connection).get_table_names()
        names = ", ".join(table.name for table in METADATA.sorted_tables if table.name in there)
        connection.execute(text(f"LOCK TABLE {names} IN SHARE ROW EXCLUSIVE MODE"))
        kept_as = back_up(connection, "repair")
        schema.upgrade(connection)
        return Repaired(kept_as=kept_as, read={}, dropped=_mend(connection), left_out=())


def _reason(path: Path) -> str:
    """Return why there can be no file of this name, such as its length; nothing where it is just missing."""
    try:
        path.lstat()
    except OSError as error:
        return "" if isinstance(error, FileNotFoundError) else f" ({error.strerror})"
    return ""


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
                # SQLite would write the log into a file that it opens, so the rows are read from a copy.
                _copy(path, work)
            read, dropped, left_out = _rebuild(database, work, made)
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
    return Repaired(kept_as=str(kept), read=read, dropped=dropped, left_out=left_out)


def _state(path: Path) -> list[tuple[int, int]]:
    """Return a value that changes with every write to the file or its log; an empty log counts as none."""
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


def _rebuild(database: Database, kept: Path, made: Path) -> tuple[Counter[str], Counter[str], tuple[str, ...]]:
    read, dropped = Counter[str](), Counter[str]()
    new = Database(url.parse(url.of_file(made)), database.lock_timeout_seconds)
    try:
        # The tables with all their constraints first: they show which rows contradict others.
        schema.prepare(new)
        with closing(sqlite3.connect(kept)) as old, new.transaction(write=True) as connection:
            # Python would refuse a whole row for one damaged byte of text.
            old.text_factory = lambda raw: raw.decode(errors="replace")
            tables = [table for table in METADATA.sorted_tables if _is_there(old, table)]
            if not tables:
                raise DatabaseDamaged(
                    f"nothing can be read of {url.masked(database.url)}, which is left unchanged; restore it "
                    "from a backup, or move it away to start a new one"
                )
            for table in tables:
                for row in _rows(old, table):
                    read[table.name] += 1
                    dropped[table.name] += not _inserted(connection, table, row)
            dropped.update(_mend(connection))
        with new.errors(), new.engine.connect() as connection:
            left_out = copy_others(kept, made)
            # The file is moved without its log.
            connection.connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        new.close()
    return read, +dropped, left_out


def _is_there(old: sqlite3.Connection, table: Table) -> bool:
    try:
        old.execute(f"SELECT * FROM {table.name} WHERE 0").close()  # noqa: S608  # a name from the code; reads no page
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
    """Return the next row with its id. Raise sqlite3.Error for a lost page, or one of another table."""
    where = "< ? ORDER BY rowid DESC" if backwards else "> ? ORDER BY rowid"
    query = f"SELECT rowid, * FROM {table.name} WHERE rowid {where} LIMIT 1"  # noqa: S608  # a name from the code
    cursor = old.execute(query, (rowid,))
    found = cursor.fetchone()
    if found is None:
        return None
    if found[0] == rowid or (found[0] < rowid) != backwards:
        raise sqlite3.DatabaseError(f"the rows of {table.name} are out of order")
    names = [column[0] for column in cursor.description[1:]]
    return found[0], dict(zip(names, found[1:], strict=True))


def _inserted(connection: Connection, table: Table, row: Mapping[str, Any]) -> bool:
    """Insert the row, and return whether its columns, value types and references are valid."""
    try:
        values = {column.name: _value(column.type, row[column.name]) for column in table.columns if column.name in row}
    except UNREADABLE:
        return False
    if any(_stored(connection, table, reading) for reading in _readings(table, values)):
        return True
    if table.name == PROVENANCE.name:  # what came from elsewhere must not look like ours
        lost = {"source": "a bundle that was lost", "exported": _NEVER, "imported": _NEVER}
        _stored(connection, BUNDLE, {"digest": values["bundle_digest"], **lost})
        return _stored(connection, table, values)
    return False


def _readings(table: Table, values: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the row as it is, then with references to agents cleared, then, for a trial, with a consistent status."""
    yield values
    agents = [key.parent.name for key in table.foreign_keys if key.column.table.name == AGENT.name]
    if agents:
        yield (values := {**values, **dict.fromkeys(agents)})
    if table.name == TRIAL.name:  # whether it is finished will follow from its outcome
        yield {**values, "status": ABANDONED, "finished": values.get("finished") or values.get("started")}


def _stored(connection: Connection, table: Any, values: Mapping[str, Any]) -> bool:
    try:
        with connection.begin_nested():
            connection.execute(table.insert().values(values))
    except (IntegrityError, *UNREADABLE):
        return False
    except StatementError as error:
        if not isinstance(error.orig, ValueError):  # a type of column refused it
            raise
        return False
    return True


def _value(kind: Any, value: Any) -> Any:
    """Convert a raw SQLite value to the type of its column. Raise ValueError or TypeError."""
    if value is None:
        return None
    if isinstance(kind, UtcDateTime):
        return datetime.fromisoformat(value).replace(tzinfo=UTC)
    if isinstance(kind, JSON):
        return json.loads(value)
    return kind.python_type(value)


def _mend(connection: Connection) -> Counter[str]:
    """Drop inconsistent rows, restore derived values, and return the number of dropped rows by table."""
    dropped = Counter[str]()
    for table in ROW_CHECKS.keys() - {TRIAL}:
        dropped += _without_bad(connection, table)
    for trial in list(whole_trials(connection, rows.whole(TRIAL))):
        _mend_trial(connection, trial)
    dropped += _without_bad(connection, TRIAL)
    for study in connection.execute(select(STUDY)).mappings().all():
        dropped += _mend_study(connection, study)
    ended = select(AGENT.c.id).where(AGENT.c.ended.is_not(None))
    connection.execute(delete(LEASE).where(LEASE.c.agent_id.in_(ended)))
    for table, key in list(lost_annotations(connection)):
        dropped += _drop(connection, table, key)
    _forget_lost(connection)
    return dropped


def _forget_lost(connection: Connection) -> None:
    """Drop the provenance of missing rows, so that a later import brings them back as new ones.

    Entries of deleted rows stay, unless they name no table.
    """
    connection.execute(delete(DELETED).where(DELETED.c.kind.not_in(METADATA.tables)))
    for name in connection.scalars(select(PROVENANCE.c.kind).distinct()).all():
        of_kind = delete(PROVENANCE).where(PROVENANCE.c.kind == name)
        table = METADATA.tables.get(name)
        known = [] if table is None else connection.execute(select(*table.primary_key)).all()
        keys = set(map(rows.text_of, known))
        for key in connection.scalars(select(PROVENANCE.c.key).where(PROVENANCE.c.kind == name)).all():
            if key not in keys:
                connection.execute(of_kind.where(PROVENANCE.c.key == key))


def _without_bad(connection: Connection, table: Table) -> Counter[str]:
    dropped = Counter[str]()
    for key, _ in list(bad_rows(connection, table)):
        dropped += _drop(connection, table, key)
    return dropped


def _drop(connection: Connection, table: Table, key: tuple[Any, ...]) -> Counter[str]:
    """Delete a row and all rows that refer to it, and return their number by table."""
    dropped = Counter({table.name: 1})
    for other in METADATA.tables.values():
        for reference in other.foreign_keys:
            if reference.column.table is not table:
                continue
            owners = select(*other.primary_key).where(reference.parent == key[0])
            for owner in connection.execute(owners).all():
                dropped += _drop(connection, other, tuple(owner))
    connection.execute(delete(table).where(rows.has_key(table, key)))
    return dropped


def _mend_trial(connection: Connection, trial: Row) -> None:
    """Derive the status from the outcome, and the measurements of the ranks from its document."""
    key, status = trial[TRIAL.c.id], trial[TRIAL.c.status]
    if trial[OUTCOME.c.trial_id] is None:
        if status == FINISHED:
            rows.change(connection, TRIAL, key, status=ABANDONED)
        return
    rows.change(connection, TRIAL, key, status=FINISHED, finished=trial[TRIAL.c.finished] or trial[TRIAL.c.started])
    connection.execute(delete(STAGE_MEASUREMENT).where(STAGE_MEASUREMENT.c.trial_id == key))
    found = codec.outcome_of(trial[OUTCOME.c.document])
    rows.add(connection, STAGE_MEASUREMENT, codec.stage_rows(key, found))


def _mend_study(connection: Connection, study: Row) -> Counter[str]:
    """Number the trials without gaps, drop a winner of another workload, and derive the end from the winner."""
    key, dropped = study[STUDY.c.id], Counter[str]()
    trials = select(TRIAL.c.id, TRIAL.c.number).where(TRIAL.c.study_id == key).order_by(TRIAL.c.number)
    for number, (trial, stored) in enumerate(connection.execute(trials).all()):
        if stored != number:
            rows.change(connection, TRIAL, trial, number=number)
    best = connection.execute(select(BEST_PLAN).where(BEST_PLAN.c.study_id == key)).mappings().one_or_none()
    if best is not None and best[BEST_PLAN.c.workload_fingerprint] != study[STUDY.c.workload_fingerprint]:
        dropped, best = _drop(connection, BEST_PLAN, (key,)), None
    if best is None and study[STUDY.c.finished] is not None:
        rows.change(connection, STUDY, key, finished=None, calibration_state=None, leader_id=None)
    elif best is not None and study[STUDY.c.finished] is None:
        rows.change(connection, STUDY, key, finished=best[BEST_PLAN.c.created])
    return dropped
