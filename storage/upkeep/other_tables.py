"""Tables of other programs, as Optuna's, in a SQLite file that is repaired."""

import sqlite3
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path

_RESERVED = ("autotune_", "sqlite_")
"""Beginnings of the names of autotune's own tables and of SQLite's."""
_TABLE = "table"
_OF_THIS_COMPUTER = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM}
"""Errors that say nothing about a table."""


def copy_others(source: Path, target: Path) -> tuple[str, ...]:
    """Copy tables of other programs, with their indexes, triggers and views; return the names of those left out.

    A table is left out if a row cannot be read, and with it those that refer to it, or that it refers to: a program
    expects the rows of all. Raise sqlite3.Error where the target cannot be written.
    """
    with closing(sqlite3.connect(target, isolation_level=None)) as connection:
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        connection.execute("ATTACH ? AS old", (str(source),))
        stored = connection.execute("SELECT type, name, tbl_name, sql FROM old.sqlite_master WHERE sql NOTNULL")
        others = [each for each in stored.fetchall() if not each[2].startswith(_RESERVED)]
        tables = {name: sql for kind, name, _, sql in others if kind == _TABLE}
        # Of a virtual table, rows are in others that its module has made: `words_data` for `words`.
        virtual = {name for name, sql in tables.items() if sql.startswith("CREATE VIRTUAL")}
        virtual |= {name for name in tables if name.startswith(tuple(f"{each}_" for each in virtual))}
        plain = tables.keys() - virtual
        left_out = virtual | {
            name for name in plain if not _is_done(connection, tables[name], _rows_into(connection, name))
        }
        left_out = _with_related(connection, tables, left_out)
        for name in left_out:
            connection.execute(f"DROP TABLE IF EXISTS main.{_quoted(name)}")
        # After the rows, which a trigger would change.
        more = [(name, sql) for kind, name, table, sql in others if kind != _TABLE and table not in left_out]
        return (*sorted(left_out), *(name for name, sql in more if not _is_done(connection, sql)))


def _rows_into(connection: sqlite3.Connection, table: str) -> str:
    # Others are computed, and cannot be written.
    stored = connection.execute("SELECT name FROM pragma_table_xinfo(?, ?) WHERE hidden = 0", (table, "old"))
    columns = ", ".join(_quoted(name) for (name,) in stored)
    # Without a condition SQLite would copy whole records, and check neither their columns nor constraints.
    copied = f"SELECT {columns} FROM old.{_quoted(table)} WHERE true"  # noqa: S608  # quoted
    return f"INSERT INTO main.{_quoted(table)} ({columns}) {copied}"


def _is_done(connection: sqlite3.Connection, *statements: str) -> bool:
    """Execute all statements or none, and return whether they could be executed."""
    connection.execute("BEGIN")
    try:
        with connection:
            for each in statements:
                connection.execute(each)
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _OF_THIS_COMPUTER:
            raise
        return False
    return True


def _with_related(connection: sqlite3.Connection, tables: Mapping[str, str], left_out: set[str]) -> set[str]:
    """Return the tables, and all others that references connect with them."""
    pairs = list[set[str]]()
    for name in tables:
        with suppress(sqlite3.Error):
            found = connection.execute('SELECT "table" FROM pragma_foreign_key_list(?, ?)', (name, "old"))
            pairs += [{name, other} for (other,) in found if other in tables]
    while more := {name for pair in pairs if pair & left_out for name in pair - left_out}:
        left_out = left_out | more
    return left_out


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
