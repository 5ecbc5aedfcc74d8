"""The winners of studies: kept, listed and found by the beginning of their id."""

import difflib

from sqlalchemy import func, select
from sqlalchemy.orm import Session
from sqlalchemy.sql.elements import ColumnElement

from storage import codec, rows, workloads
from storage.errors import AmbiguousPlan, UnknownPlan
from storage.records import BestPlan
from storage.tables import BestPlanRow, HardwareRow, ModelRow, StudyRow, WorkloadRow


def save(session: Session, best: BestPlan) -> None:
    rows.get(session, StudyRow, best.study_id, lock=True)
    workloads.add(session, best.workload)
    rows.ensure(session, codec.plan_row(best.plan))
    session.merge(codec.best_plan_row(best))


def listed(
    session: Session,
    *,
    hardware_fingerprint: str | None,
    hardware_name: str | None,
    model_name: str | None,
    workload_fingerprint: str | None,
    limit: int | None,
) -> tuple[BestPlan, ...]:
    conditions: list[ColumnElement[bool]] = []
    if hardware_fingerprint is not None:
        conditions.append(WorkloadRow.hardware_fingerprint == hardware_fingerprint)
    if hardware_name is not None:
        conditions.append(HardwareRow.device_name.icontains(hardware_name, autoescape=True))
    if model_name is not None:
        conditions.append(ModelRow.name.icontains(model_name, autoescape=True))
    if workload_fingerprint is not None:
        conditions.append(BestPlanRow.workload_fingerprint == workload_fingerprint)
    newest = func.max(BestPlanRow.created).over(partition_by=BestPlanRow.workload_fingerprint)
    query = (
        select(BestPlanRow)
        .join(BestPlanRow.workload)
        .join(WorkloadRow.hardware)
        .join(WorkloadRow.model)
        .where(*conditions)
        .order_by(newest.desc(), BestPlanRow.workload_fingerprint, BestPlanRow.epoch_seconds)
        .limit(limit)
    )
    return tuple(codec.best_plan(row) for row in session.scalars(query))


def find(session: Session, id_prefix: str) -> BestPlan:
    prefix = id_prefix.lower()
    ids = session.scalars(select(BestPlanRow.plan_id).distinct().order_by(BestPlanRow.plan_id)).all()
    matches = [plan_id for plan_id in ids if plan_id.startswith(prefix)]
    if not matches:
        near = difflib.get_close_matches(prefix, ids, n=3, cutoff=0.0)
        advice = f"near ids are {', '.join(near)}" if near else "no study has found a plan yet; run a search first"
        raise UnknownPlan(f"no plan begins with {id_prefix!r}; {advice}")
    if len(matches) > 1:
        raise AmbiguousPlan(f"{len(matches)} plans begin with {id_prefix!r}: {', '.join(matches[:5])}; add digits")
    query = select(BestPlanRow).where(BestPlanRow.plan_id == matches[0]).order_by(BestPlanRow.created.desc())
    return codec.best_plan(session.scalars(query.limit(1)).one())
