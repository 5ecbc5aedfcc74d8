"""Provenance of imported rows."""

from typing import Any

from sqlalchemy import Select, and_, exists, inspect, select
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased
from sqlalchemy.sql.elements import ColumnElement

from storage.database.tables import Base, BundleRow, ProvenanceRow, StudyRow

_STUDY = StudyRow.__tablename__


def of(session: Session, row: Base) -> ProvenanceRow | None:
    """Return the provenance of an imported row; None for a local one."""
    return session.get(ProvenanceRow, (row.__tablename__, key_of(row)))


def key_of(row: Base) -> str:
    """Return the values of the primary key as one text."""
    return "/".join(str(value) for value in inspect(type(row)).primary_key_from_instance(row))


def is_foreign(study_id: InstrumentedAttribute[str]) -> ColumnElement[bool]:
    """Return the condition that the study was imported."""
    of_study = aliased(ProvenanceRow)  # a query may join the table for itself
    return exists(select(of_study.key).where(of_study.kind == _STUDY, of_study.key == study_id))


def with_source(query: Select[Any], study_id: InstrumentedAttribute[str]) -> Select[Any]:
    """Add a column to the query: the database that the study was imported from, or NULL."""
    return (
        query.add_columns(BundleRow.source)
        .outerjoin(ProvenanceRow, and_(ProvenanceRow.kind == _STUDY, ProvenanceRow.key == study_id))
        .outerjoin(BundleRow, BundleRow.digest == ProvenanceRow.bundle_digest)
    )
