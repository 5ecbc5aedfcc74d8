"""Full trainings that were started with a plan."""

from collections import defaultdict
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from sqlalchemy import ColumnElement, Connection, insert, select

from storage.database import rows
from storage.database.tables import LAUNCH, LAUNCH_WINDOW, PLAN, RUNNING, WORKLOAD
from storage.errors import AlreadyFinished
from storage.launch_speed import LaunchWindow
from storage.queries import agents, codec, provenance
from storage.records import LaunchRecord, LaunchResult
from trials.plan import Plan


def start(
    connection: Connection,
    plan: Plan,
    workload_fingerprint: str,
    promised_samples_per_second: float | None,
    agent_id: str | None = None,
) -> LaunchRecord:
    """Record the start of a full training."""
    agents.check(connection, agent_id)
    rows.ensure(connection, PLAN, codec.plan_row(plan))
    rows.get(connection, WORKLOAD, workload_fingerprint)
    values: dict[str, Any] = {
        "id": uuid4().hex,
        "plan_id": plan.id,
        "workload_fingerprint": workload_fingerprint,
        "started": datetime.now(UTC),
        "promised_samples_per_second": promised_samples_per_second,
        "agent_id": agent_id,
    }
    connection.execute(insert(LAUNCH).values(**values, status=RUNNING))
    return LaunchRecord(**values, result=None)


def finish(connection: Connection, result: LaunchResult) -> None:
    """Record the end of a training; again has no effect. Raise AlreadyFinished for a different end."""
    row = rows.get(connection, LAUNCH, result.launch_id, lock=True)
    if row["status"] != RUNNING:
        if codec.launch_result(row) != result:
            raise AlreadyFinished(
                f"launch {result.launch_id} already ended as {row['status']}, which stays; start a new launch"
            )
        return
    end = codec.columns(result)
    rows.change(connection, LAUNCH, end.pop("launch_id"), **end)


def add_window(connection: Connection, window: LaunchWindow) -> None:
    """Store the speed of a training over some steps, also after its end; again has no effect.

    Raise AlreadyFinished for other figures of a window that begins with the same step.
    """
    rows.get(connection, LAUNCH, window.launch_id, lock=True)
    key = rows.has_key(LAUNCH_WINDOW, (window.launch_id, window.first_step))
    stored = connection.execute(select(LAUNCH_WINDOW).where(key)).mappings().one_or_none()
    if stored is None:
        connection.execute(insert(LAUNCH_WINDOW).values(codec.window_row(window)))
    elif codec.window(stored) != window:
        raise AlreadyFinished(
            f"the speed of launch {window.launch_id} from step {window.first_step} on is stored with other figures, "
            "which stay"
        )


def running(connection: Connection) -> tuple[LaunchRecord, ...]:
    """Return the trainings without a recorded end, oldest first; their agents show whether they still run."""
    return _whole(connection, LAUNCH.c.status == RUNNING)


def of_plan(connection: Connection, plan_id: str) -> tuple[LaunchRecord, ...]:
    """Return all trainings with the plan, oldest first. Empty for an unknown plan."""
    return _whole(connection, LAUNCH.c.plan_id == plan_id)


def _whole(connection: Connection, condition: ColumnElement[bool]) -> tuple[LaunchRecord, ...]:
    """Return the launches that meet a condition, with their windows, oldest first."""
    query = select(LAUNCH).where(condition).order_by(LAUNCH.c.started, LAUNCH.c.id)
    sourced = provenance.with_source(query, LAUNCH.c.id, LAUNCH)
    found = tuple(rows.readable(LAUNCH, connection.execute(sourced).mappings(), codec.launch))
    speeds = select(LAUNCH_WINDOW).join(LAUNCH).where(condition).order_by(LAUNCH_WINDOW.c.first_step)
    windows = defaultdict[str, list[LaunchWindow]](list)
    for window in rows.readable(LAUNCH_WINDOW, connection.execute(speeds).mappings(), codec.window):
        windows[window.launch_id].append(window)
    return tuple(replace(launch, windows=tuple(windows[launch.id])) for launch in found)
