"""Vacuum, which frees the space of deleted rows."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, bindparam, inspect, text

from storage.database.engine import Database
from storage.database.url import masked, sqlite_path
from storage.errors import DatabaseUnavailable
from storage.upkeep import schema

_PREFIX = "autotune_"
_MEBI = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vacuumed:
    """Summary of a vacuum."""

    bytes_before: int
    """Of a SQLite file with its log; of autotune's tables with their indices in PostgreSQL."""
    bytes_after: int


def vacuum(database: Database, check: Callable[[], None]) -> Vacuumed:
    """Rewrite a SQLite file without the space of deleted rows; mark that of PostgreSQL's tables for reuse.

    Update the statistics from which queries are planned. Raise DatabaseUnavailable, with nothing changed.
    """
    path = sqlite_path(database.url)
    if path is None:
        return _vacuum_server(database)
    check()
    with schema.lock(database), database.errors(), database.engine.connect() as connection:
        # The driver's own connection, since SQLite vacuums outside of transactions only.
        cursor = connection.connection.cursor()
        _move_log(cursor)
        before = _size(path)
        _check_space(database, path, cursor)
        cursor.execute("VACUUM")
        cursor.execute("ANALYZE")
        _move_log(cursor)
        return Vacuumed(bytes_before=before, bytes_after=_size(path))


def _move_log(cursor: Any) -> None:
    """Move the write-ahead log into the file, as far as no other process reads."""
    cursor.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _size(path: Path) -> int:
    log = path.with_name(f"{path.name}-wal")
    return path.stat().st_size + (log.stat().st_size if log.exists() else 0)


def _check_space(database: Database, path: Path, cursor: Any) -> None:
    """Raise DatabaseUnavailable if the disk cannot hold the new file together with the old one."""
    pages, unused, page_bytes = (
        cursor.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    needed, free = (pages - unused) * page_bytes, shutil.disk_usage(path.parent).free
    if free < needed:
        raise DatabaseUnavailable(
            f"a vacuum of {masked(database.url)} needs {needed / _MEBI:.1f} MiB of free space in {path.parent}, which "
            f"has {free / _MEBI:.1f} MiB; free some space and try again"
        )


def _vacuum_server(database: Database) -> Vacuumed:
    with database.errors(), database.engine.connect() as opened:
        connection = opened.execution_options(isolation_level="AUTOCOMMIT")  # it refuses to run in a transaction
        driver: Any = connection.connection.driver_connection
        notices: list[str] = []

        def note(notice: Any) -> None:
            notices.append(notice.message_primary)

        driver.add_notice_handler(note)
        try:
            names = sorted(name for name in inspect(connection).get_table_names() if name.startswith(_PREFIX))
            before = _server_size(connection, names)
            connection.execute(text(f"VACUUM (ANALYZE) {', '.join(names)}"))
            after = _server_size(connection, names)
        finally:
            driver.remove_notice_handler(note)
    for notice in notices:  # a table of another user is left out with a warning
        _log.warning("%s", notice)
    return Vacuumed(bytes_before=before, bytes_after=after)


def _server_size(connection: Connection, names: list[str]) -> int:
    total = text(
        "SELECT sum(pg_total_relation_size(oid)) FROM pg_class WHERE oid IN (SELECT unnest(CAST(:names AS regclass[])))"
    )
    return int(connection.scalar(total.bindparams(bindparam("names", names))) or 0)
