"""Agents, the processes that use the devices: heartbeats and leases.

Leases are fenced by the id of the agent, which is never used again: the successor of a silent agent ends it, and the
requests of an ended agent are refused in the transaction that would have granted them.
"""

from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from uuid import uuid4

from sqlalchemy import ColumnElement, delete, func, select, type_coerce
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from storage.database import rows
from storage.database.tables import AgentRow, LeaseRow, StudyRow, UtcDateTime
from storage.errors import ResourceHeld, Superseded
from storage.records import AgentRecord


def add(session: Session, machine: str, process: str) -> AgentRecord:
    row = AgentRow(
        id=uuid4().hex, machine=machine, process=process, started=datetime.now(UTC), beats=0, heard=_database_time()
    )
    session.add(row)
    return _record(row, silent_seconds=0.0)


def beat(session: Session, agent_id: str) -> Mapping[str, AgentRecord]:
    row = rows.get(session, AgentRow, agent_id, lock=True)
    row.beats, row.heard = row.beats + 1, _database_time()
    return present(session)


def present(session: Session) -> Mapping[str, AgentRecord]:
    found = session.execute(select(AgentRow, _database_time()).where(AgentRow.ended.is_(None)))
    return {row.id: _record(row, (now - row.heard).total_seconds() if row.heard else None) for row, now in found}


def end(session: Session, agent_id: str) -> None:
    row = rows.get(session, AgentRow, agent_id, lock=True)
    row.ended = row.ended or datetime.now(UTC)
    session.execute(delete(LeaseRow).where(LeaseRow.agent_id == agent_id))


def check(session: Session, agent_id: str | None) -> None:
    """Raise Superseded if the agent has ended, and keep others from ending it until the transaction ends."""
    if agent_id is not None and rows.get(session, AgentRow, agent_id, lock=True).ended is not None:
        raise Superseded(
            "this process sent no heartbeat for so long that another took over its work; its measurements are "
            "kept. Run the command again to continue"
        )


def take(session: Session, agent_id: str, resources: Collection[str], gone: Collection[str]) -> None:
    check(session, agent_id)
    for resource in sorted(resources):  # in the same order everywhere, so that two agents cannot deadlock
        while not _taken(session, agent_id, resource, gone):
            pass  # its holder has just ended, or another has just come


def _taken(session: Session, agent_id: str, resource: str, gone: Collection[str]) -> bool:
    """Try to take the lease once, and return whether that worked. Raises ResourceHeld."""
    holder = session.scalar(select(LeaseRow.agent_id).where(LeaseRow.resource == resource))
    if holder == agent_id:
        return True
    if holder is not None:
        if holder not in gone:
            raise ResourceHeld(resource, holder)
        end(session, holder)  # as the holder itself would do it: first its row, then what it holds
    try:
        with session.begin_nested():  # the primary key decides between two agents
            session.add(LeaseRow(resource=resource, agent_id=agent_id))
    except IntegrityError:
        return False
    return True


def lead(session: Session, study_id: str, agent_id: str, instead_of: str | None) -> None:
    row = rows.get(session, StudyRow, study_id, lock=True)
    check(session, agent_id)
    if row.leader_id in (None, instead_of):
        row.leader_id = agent_id


def _database_time() -> ColumnElement[datetime]:
    # The clocks of the machines of a team differ.
    return type_coerce(func.current_timestamp(), UtcDateTime)


def _record(row: AgentRow, silent_seconds: float | None) -> AgentRecord:
    return AgentRecord(
        id=row.id, machine=row.machine, process=row.process, beats=row.beats, silent_seconds=silent_seconds
    )
