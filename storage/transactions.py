"""Queries as methods of a store: each runs in a transaction of its own, and says itself what it does."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection

Given = ParamSpec("Given")
Found = TypeVar("Found")


def reading(query: Callable[Concatenate[Connection, Given], Found]) -> Callable[Concatenate[Any, Given], Found]:
    """Return the query as a method of a class with a `_database`."""
    return _method(query, write=False)


def writing(query: Callable[Concatenate[Connection, Given], Found]) -> Callable[Concatenate[Any, Given], Found]:
    """Return a query that changes rows as such a method, whose changes are on disk when it returns."""
    return _method(query, write=True)


def _method(
    query: Callable[Concatenate[Connection, Given], Found], *, write: bool
) -> Callable[Concatenate[Any, Given], Found]:
    @wraps(query)
    def method(self: Any, /, *args: Given.args, **kwargs: Given.kwargs) -> Found:
        with self._database.transaction(write=write) as connection:
            return query(connection, *args, **kwargs)

    return method
