"""Workloads, and the layer profiles that their studies share."""

from dataclasses import replace
from datetime import UTC, datetime

from sqlalchemy import Select, select
from sqlalchemy.orm import Session

from storage.database import rows
from storage.database.rekeying import Rekeying
from storage.database.tables import Base, DataProfileRow, HardwareRow, LayerProfileRow, ModelRow, WorkloadRow
from storage.queries import codec, provenance
from storage.records import LayerProfile
from trials.workload import PATH_DIGEST, ModelShape, Software, Workload


def add(session: Session, workload: Workload) -> str:
    # Always in this order, so that two processes that add the same values cannot deadlock.
    for row, value in ((HardwareRow, workload.hardware), (ModelRow, workload.model), (DataProfileRow, workload.data)):
        rows.ensure(session, row(fingerprint=value.fingerprint, **codec.columns(value)))
    return rows.ensure(session, codec.workload_row(workload)).fingerprint


def adopt_model(session: Session, model: ModelShape, path_digest: str) -> None:
    old = replace(model, config_digest=f"{PATH_DIGEST}{path_digest}").fingerprint
    if session.get(ModelRow, old, with_for_update={"of": ModelRow}) is None:
        return
    of_model = session.scalars(select(WorkloadRow).where(WorkloadRow.model_fingerprint == old))
    keys = {row.fingerprint: replace(codec.workload(row), model=model).fingerprint for row in of_model}
    session.expunge_all()  # the statements below change rows without the knowledge of the session
    Rekeying(session.connection(), Base.metadata.tables).model(old, model.fingerprint, model.config_digest, keys)


def get(session: Session, fingerprint: str) -> Workload:
    return codec.workload(rows.get(session, WorkloadRow, fingerprint))


def layer_profile(session: Session, hardware: str, model: str, software: Software) -> LayerProfile | None:
    key = {"hardware_fingerprint": hardware, "model_fingerprint": model, **codec.columns(software)}
    found = session.execute(_layer_profiles().filter_by(**key)).one_or_none()
    return None if found is None or provenance.of(session, found[0]) else codec.layer_profile(*found)


def layer_profiles(session: Session, hardware_name: str | None) -> tuple[LayerProfile, ...]:
    query = _layer_profiles().order_by(LayerProfileRow.created.desc(), LayerProfileRow.hardware_fingerprint)
    if hardware_name is not None:
        query = query.where(HardwareRow.device_name.icontains(hardware_name, autoescape=True))
    found = {profile: (of_hardware, of_model) for profile, of_hardware, of_model in session.execute(query)}
    return tuple(rows.readable(found, lambda row: codec.layer_profile(row, *found[row])))


def save_layer_profile(session: Session, hardware: str, model: str, software: Software, document: str) -> None:
    now = datetime.now(UTC)
    row = rows.ensure(
        session,
        LayerProfileRow(
            hardware_fingerprint=rows.get(session, HardwareRow, hardware).fingerprint,
            model_fingerprint=rows.get(session, ModelRow, model).fingerprint,
            **codec.columns(software),
            created=now,
            document=document,
        ),
    )
    row.created, row.document = now, document
    if imported := provenance.of(session, row):  # measured anew here
        session.delete(imported)


def _layer_profiles() -> Select[LayerProfileRow, HardwareRow, ModelRow]:
    return (
        select(LayerProfileRow, HardwareRow, ModelRow)
        .join(HardwareRow, HardwareRow.fingerprint == LayerProfileRow.hardware_fingerprint)
        .join(ModelRow, ModelRow.fingerprint == LayerProfileRow.model_fingerprint)
    )
