"""Full trainings that were started with a plan."""

from datetime import UTC, datetime
from uuid import uuid4

from sqlalchemy import select
from sqlalchemy.orm import Session

from storage.database import rows
from storage.database.tables import RUNNING, LaunchRow, WorkloadRow
from storage.errors import AlreadyFinished
from storage.queries import agents, codec
from storage.records import LaunchRecord, LaunchResult
from trials.plan import Plan


def start(
    session: Session,
    plan: Plan,
    workload_fingerprint: str,
    predicted_samples_per_second: float | None,
    agent_id: str | None,
) -> LaunchRecord:
    agents.check(session, agent_id)
    row = LaunchRow(
        id=uuid4().hex,
        plan_id=rows.ensure(session, codec.plan_row(plan)).id,
        workload_fingerprint=rows.get(session, WorkloadRow, workload_fingerprint).fingerprint,
        started=datetime.now(UTC),
        predicted_samples_per_second=predicted_samples_per_second,
        status=RUNNING,
        agent_id=agent_id,
    )
    session.add(row)
    session.flush()  # so that an unknown agent is refused here
    return codec.launch(row)


def finish(session: Session, result: LaunchResult) -> None:
    row = rows.get(session, LaunchRow, result.launch_id, lock=True)
    if row.status != RUNNING:
        if codec.launch_result(row) != result:
            raise AlreadyFinished(f"launch {row.id} already ended as {row.status}, which stays; start a new launch")
        return
    row.status, row.steps, row.samples_per_second = result.status, result.steps, result.samples_per_second
    row.finished = result.finished


def running(session: Session) -> tuple[LaunchRecord, ...]:
    query = select(LaunchRow).where(LaunchRow.status == RUNNING).order_by(LaunchRow.started, LaunchRow.id)
    return tuple(rows.readable(session.scalars(query), codec.launch))


def of_plan(session: Session, plan_id: str) -> tuple[LaunchRecord, ...]:
    query = select(LaunchRow).where(LaunchRow.plan_id == plan_id).order_by(LaunchRow.started, LaunchRow.id)
    return tuple(rows.readable(session.scalars(query), codec.launch))
