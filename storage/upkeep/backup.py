"""A copy of the tables before they are changed."""

import os
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from sqlalchemy import Connection, inspect, text

from storage.database.url import sqlite_path
from trials.whole_file import sync

_PREFIX = "autotune_"


def back_up(connection: Connection, revision: str) -> str:
    """Copy the tables, while the connection holds the write lock, and return where the copy is, for messages.

    The copy of a SQLite file is a file in the same folder. In PostgreSQL the tables of autotune are copied into a
    new schema, in the transaction of the connection.
    """
    path = sqlite_path(connection.engine.url)
    name = f"{revision}_{stamp()}"
    if path is not None:
        return str(copy_file(path, path.with_name(f"{path.name}.backup-{name}")))
    schema = f"{_PREFIX}backup_{name}"
    connection.execute(text(f"CREATE SCHEMA {schema}"))
    for table in inspect(connection).get_table_names():
        if table.startswith(_PREFIX):
            # Only the rows: their keys and constraints follow from the revision.
            connection.execute(text(f"CREATE TABLE {schema}.{table} AS TABLE {table}"))
    return f"the schema {schema}"


def stamp() -> str:
    """Return the time as part of a unique name."""
    return f"{datetime.now(UTC):%Y%m%dt%H%M%S%f}"


def copy_file(source: Path, target: Path) -> Path:
    """Copy a SQLite file consistently, including its write-ahead log, and sync the copy, which has mode 0600."""
    os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        with closing(sqlite3.connect(source)) as old, closing(sqlite3.connect(target)) as new:
            old.backup(new)  # a copy of the bytes would miss what is still in the log
            new.execute("PRAGMA journal_mode = DELETE")  # one file
        sync(target, target.parent)
    except BaseException:
        target.unlink()  # a part of a copy is worth less than its space
        raise
    return target
