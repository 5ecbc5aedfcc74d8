"""Agents: processes that run trials of a study, and the signs of life that they give each other."""

from collections.abc import Mapping
from datetime import UTC, datetime
from uuid import uuid4

from sqlalchemy import select
from sqlalchemy.orm import Session

from storage import rows
from storage.records import AgentRecord
from storage.tables import AgentRow, StudyRow


def add(session: Session, machine: str, process: str) -> AgentRecord:
    row = AgentRow(id=uuid4().hex, machine=machine, process=process, started=datetime.now(UTC), beats=0)
    session.add(row)
    return AgentRecord(id=row.id, machine=machine, process=process, beats=0)


def beat(session: Session, agent_id: str) -> Mapping[str, AgentRecord]:
    row = rows.get(session, AgentRow, agent_id, lock=True)
    row.beats += 1
    present = session.scalars(select(AgentRow).where(AgentRow.ended.is_(None)))
    return {
        each.id: AgentRecord(id=each.id, machine=each.machine, process=each.process, beats=each.beats)
        for each in present
    }


def end(session: Session, agent_id: str) -> None:
    row = rows.get(session, AgentRow, agent_id, lock=True)
    row.ended = row.ended or datetime.now(UTC)


def lead(session: Session, study_id: str, agent_id: str, instead_of: str | None) -> None:
    row = rows.get(session, StudyRow, study_id, lock=True)
    if row.leader_id in (None, instead_of):
        row.leader_id = agent_id


def may_conclude(session: Session, study_id: str, agent_id: str) -> bool:
    """It stays so until the transaction ends."""
    row = rows.get(session, StudyRow, study_id, lock=True)
    return row.finished is None and row.leader_id == agent_id
