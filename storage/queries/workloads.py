"""Workloads, and the layer profiles that their studies share."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection, Select, delete, exists, select, update

from storage.database import rows
from storage.database.tables import (
    DATA_PROFILE,
    HARDWARE,
    LAYER_PROFILE,
    MODEL,
    PROVENANCE,
    WORKLOAD,
)
from storage.queries import codec, provenance
from storage.records import LayerProfile
from trials.workload import Software, Workload


def add(connection: Connection, workload: Workload) -> str:
    """Store the workload unless it is stored already, and return its fingerprint."""
    # Always in this order, so that two processes that add the same values cannot deadlock.
    for table, value in ((HARDWARE, workload.hardware), (MODEL, workload.model), (DATA_PROFILE, workload.data)):
        rows.ensure(connection, table, {"fingerprint": value.fingerprint, **codec.columns(value)})
    rows.ensure(connection, WORKLOAD, codec.workload_row(workload))
    return workload.fingerprint


def get(connection: Connection, fingerprint: str) -> Workload:
    return codec.workload(rows.get(connection, WORKLOAD, fingerprint))


def layer_profile(
    connection: Connection, hardware_fingerprint: str, model_fingerprint: str, software: Software
) -> LayerProfile | None:
    """Return the profile of exactly this hardware, model and software, or None."""
    key = {
        "hardware_fingerprint": hardware_fingerprint,
        "model_fingerprint": model_fingerprint,
        **codec.columns(software),
    }
    query = _layer_profiles().where(*(LAYER_PROFILE.c[name] == value for name, value in key.items()))
    found = connection.execute(query).mappings().one_or_none()
    if found is None:
        return None
    imported = provenance.is_of(LAYER_PROFILE, rows.key_of(LAYER_PROFILE, found))
    return None if connection.scalar(select(exists().where(imported))) else codec.layer_profile(found)


def layer_profiles(connection: Connection, *, hardware_name: str | None = None) -> tuple[LayerProfile, ...]:
    """Return the profiles, newest first, optionally only those whose device name contains `hardware_name`."""
    query = _layer_profiles().order_by(LAYER_PROFILE.c.created.desc(), LAYER_PROFILE.c.hardware_fingerprint)
    if hardware_name is not None:
        query = query.where(HARDWARE.c.device_name.icontains(hardware_name, autoescape=True))
    return tuple(rows.readable(LAYER_PROFILE, connection.execute(query).mappings(), codec.layer_profile))


def save_layer_profile(
    connection: Connection, hardware_fingerprint: str, model_fingerprint: str, software: Software, document: str
) -> None:
    """Store a JSON text, replacing an earlier one. Hardware and model must belong to a stored workload."""
    for table, part in ((HARDWARE, hardware_fingerprint), (MODEL, model_fingerprint)):
        rows.get(connection, table, part)
    row = {
        "hardware_fingerprint": hardware_fingerprint,
        "model_fingerprint": model_fingerprint,
        **codec.columns(software),
    }
    measured = {"created": datetime.now(UTC), "document": document}
    rows.ensure(connection, LAYER_PROFILE, row | measured)
    key = tuple(row[column.name] for column in LAYER_PROFILE.primary_key)
    connection.execute(update(LAYER_PROFILE).where(rows.has_key(LAYER_PROFILE, key)).values(measured))
    connection.execute(delete(PROVENANCE).where(provenance.is_of(LAYER_PROFILE, key)))  # measured anew here


def _layer_profiles() -> Select[Any]:
    return select(LAYER_PROFILE.join(HARDWARE).join(MODEL))
