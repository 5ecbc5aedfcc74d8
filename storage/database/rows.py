"""Rows by key, safe against concurrent writers, and the readable rows of a result."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from sqlalchemy import inspect
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from storage.database.engine import UNREADABLE
from storage.database.tables import Base
from storage.errors import UnknownRecord

R = TypeVar("R", bound=Base)
V = TypeVar("V")
_logger = logging.getLogger(__name__)


def ensure(session: Session, row: R) -> R:
    """Add `row`, or return the stored row with its key, which another process may have added meanwhile."""
    key = inspect(type(row)).primary_key_from_instance(row)
    found = session.get(type(row), key)
    if found is not None:
        return found
    try:
        # After an error PostgreSQL refuses every statement but the rollback, here to a savepoint.
        with session.begin_nested():
            session.add(row)
    except IntegrityError:
        return session.get_one(type(row), key)
    return row


def get(session: Session, kind: type[R], key: str, *, lock: bool = False) -> R:
    """Return the row with `key`; `lock` keeps other writers away from it until the transaction ends.

    Raises UnknownRecord.
    """
    row = session.get(kind, key, with_for_update={"of": kind} if lock else None)
    if row is None:
        what = kind.__tablename__.removeprefix("autotune_").replace("_", " ")
        raise UnknownRecord(f"this database has no {what} {key!r}; is it the right database?")
    return row


def readable(found: Iterable[R], value: Callable[[R], V]) -> Iterator[V]:
    """Yield the values of the readable rows and log the others: one bad row must not hide the good ones."""
    for row in found:
        try:
            yield value(row)
        except UNREADABLE as error:
            key = "/".join(map(str, inspect(type(row)).primary_key_from_instance(row)))
            _logger.warning(
                "left out %s %s, which cannot be read (%s); run `autotune db check`, then `autotune db repair`",
                row.__tablename__,
                key,
                error,
            )
