"""Rows by key, safe against concurrent writers, and the readable rows of a result."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from sqlalchemy import ColumnElement, Connection, Select, Table, and_, insert, select, update
from sqlalchemy.exc import IntegrityError

from storage.database.engine import UNREADABLE
from storage.database.tables import DELETED, JOINED
from storage.errors import DeletedRecord, UnknownRecord

V = TypeVar("V")
Row: TypeAlias = Mapping[Any, Any]
"""Values by column, of one table or of the tables that a query joins; of a single table also by name."""
_logger = logging.getLogger(__name__)


def whole(table: Table) -> Select[Any]:
    """Select the rows of the table, joined with those that belong to its values."""
    return select(JOINED.get(table, table))


def key_of(table: Table, row: Row) -> tuple[Any, ...]:
    """Return the values of the primary key."""
    return tuple(row[column] for column in table.primary_key)


def text_of(key: Iterable[Any]) -> str:
    """Return a primary key as one text, for messages and as the key of its provenance."""
    return "/".join(map(str, key))


def has_key(table: Table, key: Iterable[Any]) -> ColumnElement[bool]:
    """Return the condition that a row has this primary key."""
    return and_(*(column == value for column, value in zip(table.primary_key, key, strict=True)))


def ensure(connection: Connection, table: Table, values: Mapping[str, Any]) -> None:
    """Insert the row unless its key is stored, by another process meanwhile perhaps."""
    key = [values[column.name] for column in table.primary_key]
    # The lock keeps others from deleting the row before a new one refers to it.
    stored = select(*table.primary_key).where(has_key(table, key)).with_for_update(read=True, key_share=True)
    if connection.execute(stored).first() is not None:
        return
    try:
        # After an error PostgreSQL refuses every statement but the rollback, here to a savepoint.
        with connection.begin_nested():
            connection.execute(insert(table).values(values))
    except IntegrityError:
        if connection.execute(stored).first() is None:
            raise


def add(connection: Connection, table: Table, values: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows with the same columns."""
    if values:  # SQLAlchemy takes an empty list for one row of defaults
        connection.execute(insert(table), values)


def get(connection: Connection, table: Table, key: str, *, lock: bool = False) -> Row:
    """Return the row with `key`; `lock` keeps other writers away from it until the transaction ends.

    Raise UnknownRecord, and DeletedRecord where a user has deleted it.
    """
    query = select(table) if lock else whole(table)
    query = query.where(has_key(table, [key]))
    # `key_share` lets others add rows that refer to this one, which they may do in any order of locks.
    query = query.with_for_update(of=table, key_share=True) if lock else query
    row = connection.execute(query).mappings().one_or_none()
    if row is None:
        what = table.name.removeprefix("autotune_").replace("_", " ")
        if time := connection.scalar(select(DELETED.c.deleted).where(has_key(DELETED, [table.name, key]))):
            raise DeletedRecord(f"{what} {key!r} was deleted on {time:%Y-%m-%d at %H:%M} UTC, with all of its study")
        raise UnknownRecord(f"this database has no {what} {key!r}; is it the right database?")
    return row


def change(connection: Connection, table: Table, key: str, **values: Any) -> None:
    """Set columns of the row with `key`."""
    connection.execute(update(table).where(has_key(table, [key])).values(values))


def readable(table: Table, found: Iterable[Row], value: Callable[[Row], V]) -> Iterator[V]:
    """Yield the values of the readable rows and log the others: one bad row must not hide the good ones."""
    for row in found:
        try:
            yield value(row)
        except UNREADABLE as error:
            _logger.warning(
                "left out %s %s, which cannot be read (%s); run `autotune db check`, then `autotune db repair`",
                table.name,
                text_of(key_of(table, row)),
                error,
            )
