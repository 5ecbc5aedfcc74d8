"""Full trainings that were started with a plan."""

from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, insert, select

from storage.database import rows
from storage.database.tables import LAUNCH, PLAN, RUNNING, WORKLOAD
from storage.errors import AlreadyFinished
from storage.queries import agents, codec
from storage.records import LaunchRecord, LaunchResult
from trials.plan import Plan


def start(
    connection: Connection,
    plan: Plan,
    workload_fingerprint: str,
    predicted_samples_per_second: float | None,
    agent_id: str | None,
) -> LaunchRecord:
    agents.check(connection, agent_id)
    rows.ensure(connection, PLAN, codec.plan_row(plan))
    rows.get(connection, WORKLOAD, workload_fingerprint)
    values: dict[str, Any] = {
        "id": uuid4().hex,
        "plan_id": plan.id,
        "workload_fingerprint": workload_fingerprint,
        "started": datetime.now(UTC),
        "predicted_samples_per_second": predicted_samples_per_second,
        "agent_id": agent_id,
    }
    connection.execute(insert(LAUNCH).values(**values, status=RUNNING))
    return LaunchRecord(**values, result=None)


def finish(connection: Connection, result: LaunchResult) -> None:
    row = rows.get(connection, LAUNCH, result.launch_id, lock=True)
    if row["status"] != RUNNING:
        if codec.launch_result(row) != result:
            raise AlreadyFinished(
                f"launch {result.launch_id} already ended as {row['status']}, which stays; start a new launch"
            )
        return
    end = codec.columns(result)
    rows.change(connection, LAUNCH, end.pop("launch_id"), **end)


def running(connection: Connection) -> tuple[LaunchRecord, ...]:
    query = select(LAUNCH).where(LAUNCH.c.status == RUNNING).order_by(LAUNCH.c.started, LAUNCH.c.id)
    return tuple(rows.readable(LAUNCH, connection.execute(query).mappings(), codec.launch))


def of_plan(connection: Connection, plan_id: str) -> tuple[LaunchRecord, ...]:
    query = select(LAUNCH).where(LAUNCH.c.plan_id == plan_id).order_by(LAUNCH.c.started, LAUNCH.c.id)
    return tuple(rows.readable(LAUNCH, connection.execute(query).mappings(), codec.launch))
