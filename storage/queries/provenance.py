"""Provenance of imported rows."""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Select, Table, and_, delete, exists, select

from storage.database import rows
from storage.database.tables import BUNDLE, PROVENANCE, STUDY


def is_of(table: Table, key: Iterable[Any]) -> ColumnElement[bool]:
    """Return the condition that an entry is the provenance of the row with this primary key."""
    return and_(PROVENANCE.c.kind == table.name, PROVENANCE.c.key == rows.text_of(key))


def forget(connection: Connection, table: Table, keys: Iterable[Iterable[Any]]) -> None:
    """Delete the provenance of the rows with these primary keys."""
    of_rows = PROVENANCE.c.key.in_([rows.text_of(key) for key in keys])
    connection.execute(delete(PROVENANCE).where(PROVENANCE.c.kind == table.name, of_rows))


def is_foreign(study_id: Column[Any]) -> ColumnElement[bool]:
    """Return the condition that the study was imported."""
    of_study = PROVENANCE.alias()  # a query may join the table for itself
    return exists(select(of_study.c.key).where(of_study.c.kind == STUDY.name, of_study.c.key == study_id))


def with_source(query: Select[Any], row_id: Column[Any], table: Table = STUDY) -> Select[Any]:
    """Add a column to the query: the database that the row of the table was imported from, or NULL."""
    return (
        query.add_columns(BUNDLE.c.source)
        .outerjoin(PROVENANCE, and_(PROVENANCE.c.kind == table.name, PROVENANCE.c.key == row_id))
        .outerjoin(BUNDLE, BUNDLE.c.digest == PROVENANCE.c.bundle_digest)
    )
