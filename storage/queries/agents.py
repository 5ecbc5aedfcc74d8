"""Agents, the processes that use the devices: heartbeats and leases.

Leases are fenced by the id of the agent, which is never used again: the successor of a silent agent ends it, and the
requests of an ended agent are refused in the transaction that would have granted them.
"""

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from uuid import uuid4

from sqlalchemy import ColumnElement, Connection, delete, func, insert, select, type_coerce
from sqlalchemy.exc import IntegrityError

from storage.database import rows
from storage.database.tables import AGENT, LEASE, STUDY, UtcDateTime
from storage.errors import ResourceHeld, Superseded
from storage.records import AgentRecord


def add(connection: Connection, machine: str, process: str) -> AgentRecord:
    """Register a process that will run trials; `AgentRecord` describes the arguments."""
    record = AgentRecord(id=uuid4().hex, machine=machine, process=process, beats=0, silent_seconds=0.0)
    known = {"id": record.id, "machine": machine, "process": process, "beats": 0}
    connection.execute(insert(AGENT).values(**known, started=datetime.now(UTC), heard=_database_time()))
    return record


def beat(connection: Connection, agent_id: str) -> Mapping[str, AgentRecord]:
    """Record a heartbeat of the agent, and return all agents that have not ended, by id, including itself."""
    row = rows.get(connection, AGENT, agent_id, lock=True)
    rows.change(connection, AGENT, agent_id, beats=row["beats"] + 1, heard=_database_time())
    return present(connection)


def present(connection: Connection) -> Mapping[str, AgentRecord]:
    """Return all agents that have not ended, by id."""
    found = connection.execute(select(AGENT, _database_time().label("now")).where(AGENT.c.ended.is_(None)))
    return {
        row.id: AgentRecord(
            id=row.id,
            machine=row.machine,
            process=row.process,
            beats=row.beats,
            silent_seconds=(row.now - row.heard).total_seconds() if row.heard else None,
            study_id=row.study_id,
        )
        for row in found
    }


def end(connection: Connection, agent_id: str) -> None:
    """End the agent and release its leases. Later calls have no effect."""
    row = rows.get(connection, AGENT, agent_id, lock=True)
    rows.change(connection, AGENT, agent_id, ended=row["ended"] or datetime.now(UTC))
    connection.execute(delete(LEASE).where(LEASE.c.agent_id == agent_id))


def check(connection: Connection, agent_id: str | None) -> None:
    """Raise Superseded if the agent has ended, and keep others from ending it until the transaction ends."""
    if agent_id is not None and rows.get(connection, AGENT, agent_id, lock=True)["ended"] is not None:
        raise Superseded(
            "this process sent no heartbeat for so long that another took over its work; its measurements are "
            "kept. Run the command again to continue"
        )


def work_on(connection: Connection, agent_id: str | None, study_id: str) -> None:
    check(connection, agent_id)
    if agent_id is not None:
        rows.change(connection, AGENT, agent_id, study_id=study_id)


def take(connection: Connection, agent_id: str, resources: Collection[str], gone: Collection[str] = ()) -> None:
    """Lease all resources to the agent until it ends, or none of them. End holders whose ids are in `gone`.

    Raise ResourceHeld if another agent holds one, and Superseded if the agent itself was ended.
    """
    check(connection, agent_id)
    for resource in sorted(resources):  # in the same order everywhere, so that two agents cannot deadlock
        while not _taken(connection, agent_id, resource, gone):
            pass  # its holder has just ended, or another has just come


def _taken(connection: Connection, agent_id: str, resource: str, gone: Collection[str]) -> bool:
    """Try to take the lease once, and return whether that worked. Raise ResourceHeld."""
    holder = connection.scalar(select(LEASE.c.agent_id).where(LEASE.c.resource == resource))
    if holder == agent_id:
        return True
    if holder is not None:
        if holder not in gone and rows.get(connection, AGENT, holder)["ended"] is None:
            raise ResourceHeld(resource, holder)
        end(connection, holder)  # as the holder itself would do it: first its row, then what it holds
    try:
        with connection.begin_nested():  # the primary key decides between two agents
            connection.execute(insert(LEASE).values(resource=resource, agent_id=agent_id))
    except IntegrityError:
        return False
    return True


def lead(connection: Connection, study_id: str, agent_id: str, instead_of: str | None = None) -> None:
    """Make the agent the leader, which concludes the study, if there is none or it is `instead_of`."""
    row = rows.get(connection, STUDY, study_id, lock=True)
    check(connection, agent_id)
    if row["leader_id"] in (None, instead_of):
        rows.change(connection, STUDY, study_id, leader_id=agent_id)


def _database_time() -> ColumnElement[datetime]:
    # The clocks of the machines of a team differ.
    return type_coerce(func.current_timestamp(), UtcDateTime)
