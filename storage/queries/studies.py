"""Studies and their trials."""

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from sqlalchemy import Select, func, or_, select
from sqlalchemy.orm import Session, joinedload

from storage.database import rows
from storage.database.tables import ABANDONED, FINISHED, RUNNING, HardwareRow, ModelRow, StudyRow, TrialRow, WorkloadRow
from storage.errors import AlreadyFinished, AmbiguousId, UnfinishedStudy, UnknownRecord
from storage.queries import agents, codec, provenance
from storage.records import AbandonedTrial, FinishedTrial, RunningTrial, StudyRecord, TrialResult
from trials.plan import Plan
from trials.workload import Workload

_SHOWN = 5
WHOLE_TRIAL = (joinedload(TrialRow.plan), joinedload(TrialRow.outcome))
"""Options of queries for many trials, which would otherwise need two more queries for each."""


def create(session: Session, workload_fingerprint: str, settings: Mapping[str, object], seed: int) -> StudyRecord:
    model = rows.get(session, WorkloadRow, workload_fingerprint, lock=True).model
    last = session.scalar(
        select(func.max(StudyRow.started)).where(StudyRow.workload_fingerprint == workload_fingerprint)
    )
    now = datetime.now(UTC)
    identity = uuid4().hex
    row = StudyRow(
        id=identity,
        name=f"{model.name}-{identity[:8]}",
        workload_fingerprint=workload_fingerprint,
        seed=seed,
        settings=dict(settings),
        started=now if last is None else max(now, last + timedelta(microseconds=1)),  # clocks are set back
    )
    session.add(row)
    session.flush()
    return codec.study(row)


def join(
    session: Session,
    workload_fingerprint: str,
    settings: Mapping[str, object],
    seed: int,
    same: Callable[[StudyRecord], bool],
) -> StudyRecord:
    rows.get(session, WorkloadRow, workload_fingerprint, lock=True)  # so that no two processes create one
    found = map(codec.study, session.scalars(_own(workload_fingerprint)))
    going_on = (study for number, study in enumerate(found) if number == 0 or study.finished is None)
    return next(filter(same, going_on), None) or create(session, workload_fingerprint, settings, seed)


def get(session: Session, study_id: str) -> StudyRecord:
    rows.get(session, StudyRow, study_id)
    row, source = session.execute(_sourced(select(StudyRow).where(StudyRow.id == study_id))).one()
    return codec.study(row, source)


def listed(session: Session, model_name: str | None, limit: int | None) -> tuple[StudyRecord, ...]:
    query = (
        select(StudyRow).join(WorkloadRow).join(ModelRow).order_by(StudyRow.started.desc(), StudyRow.id).limit(limit)
    )
    if model_name is not None:
        query = query.where(ModelRow.name.icontains(model_name, autoescape=True))
    return _records(session, query)


def find(session: Session, name: str) -> StudyRecord:
    named = or_(StudyRow.name.istartswith(name, autoescape=True), StudyRow.id.startswith(name.lower(), autoescape=True))
    found = _records(session, select(StudyRow).where(named).order_by(StudyRow.name).limit(_SHOWN))
    if not found:
        raise UnknownRecord(f"no study has a name or id that begins with {name!r}; `autotune studies` lists them")
    if len(found) > 1:
        raise AmbiguousId(
            f"several studies begin with {name!r}: {', '.join(study.name for study in found)}; add digits"
        )
    return found[0]


def check_finished(session: Session, study_id: str) -> None:
    row = rows.get(session, StudyRow, study_id)
    if row.finished is None:
        raise UnfinishedStudy(f"study {row.name} has no winner yet; run `autotune tune` until its end first")


def latest(session: Session, workload_fingerprint: str) -> StudyRecord | None:
    row = session.scalars(_own(workload_fingerprint).limit(1)).one_or_none()
    return None if row is None else codec.study(row)


def _own(workload_fingerprint: str) -> Select[StudyRow]:
    """Select the local studies of a workload, newest first."""
    query = select(StudyRow).where(
        StudyRow.workload_fingerprint == workload_fingerprint, ~provenance.is_foreign(StudyRow.id)
    )
    return query.order_by(StudyRow.started.desc())


def conclude(session: Session, study_id: str, lessons: str, agent_id: str) -> bool:
    """Finish the study, and return True, if it is unfinished and this agent leads it."""
    row = rows.get(session, StudyRow, study_id, lock=True)
    if row.finished is not None or row.leader_id != agent_id:
        return False
    row.finished, row.lessons = datetime.now(UTC), lessons
    return True


def lessons(session: Session, workload: Workload) -> str | None:
    like = {"family": workload.model.family, "dtype": workload.model.dtype}
    query = select(StudyRow.lessons).join(WorkloadRow).join(HardwareRow).join(ModelRow)
    for table, values in ((ModelRow, like), (HardwareRow, workload.hardware.kind)):
        query = query.where(*(getattr(table, name) == value for name, value in values.items()))
    ours_first = provenance.is_foreign(StudyRow.id), StudyRow.finished.desc()
    return session.scalar(query.where(StudyRow.lessons.is_not(None)).order_by(*ours_first).limit(1))


def start_trial(
    session: Session,
    study_id: str,
    plan: Plan,
    role: str,
    parameters: Mapping[str, object],
    *,
    agent_id: str | None,
) -> RunningTrial:
    rows.get(session, StudyRow, study_id, lock=True)  # so that no two trials take the same number
    agents.check(session, agent_id)
    highest = session.scalar(select(func.max(TrialRow.number)).where(TrialRow.study_id == study_id))
    row = TrialRow(
        id=uuid4().hex,
        study_id=study_id,
        agent_id=agent_id,
        number=0 if highest is None else highest + 1,
        plan_id=rows.ensure(session, codec.plan_row(plan)).id,
        role=role,
        parameters=dict(parameters),
        status=RUNNING,
        started=datetime.now(UTC),
    )
    session.add(row)
    return RunningTrial(
        id=row.id,
        study_id=study_id,
        number=row.number,
        plan=plan,
        role=role,
        parameters=dict(parameters),
        started=row.started,
        agent_id=agent_id,
    )


def is_taken(session: Session, study_id: str, plan: Plan, known: int) -> bool:
    """Return whether a trial of the plan runs, or more than `known` are finished.

    Locks the study, so that the answer holds until the transaction ends.
    """
    rows.get(session, StudyRow, study_id, lock=True)
    of_plan = select(TrialRow.status).where(TrialRow.study_id == study_id, TrialRow.plan_id == plan.id)
    found = session.scalars(of_plan).all()
    return RUNNING in found or found.count(FINISHED) > known


def finish_trial(session: Session, result: TrialResult) -> None:
    row = rows.get(session, TrialRow, result.trial_id, lock=True)
    if row.outcome is not None:
        if codec.result(row, row.outcome) != result:
            raise AlreadyFinished(f"trial {row.id} already has another result, which stays; start a new trial")
        return
    if row.status == ABANDONED:
        row.given_up = row.finished
    row.status, row.finished = FINISHED, result.finished
    session.add(codec.outcome_row(result))
    session.add_all(codec.attempt_rows(result))
    session.add_all(codec.stage_rows(result.trial_id, result.outcome))


def abandon_trial(session: Session, trial_id: str) -> None:
    row = rows.get(session, TrialRow, trial_id, lock=True)
    if row.status == RUNNING:
        row.status, row.finished = ABANDONED, datetime.now(UTC)


def running(session: Session, study_id: str | None) -> tuple[RunningTrial, ...]:
    query = _trials().where(TrialRow.status == RUNNING).order_by(TrialRow.started, TrialRow.number)
    if study_id is not None:
        query = query.where(TrialRow.study_id == study_id)
    return tuple(trial for trial in _readable(session, query) if isinstance(trial, RunningTrial))


def trials(session: Session, study_id: str) -> tuple[RunningTrial | AbandonedTrial | FinishedTrial, ...]:
    query = _trials().where(TrialRow.study_id == study_id).order_by(TrialRow.number)
    return tuple(_readable(session, query))


def answers(session: Session, workload_fingerprint: str) -> tuple[FinishedTrial, ...]:
    of_workload = StudyRow.workload_fingerprint == workload_fingerprint
    return _finished(session, _trials().join(StudyRow).where(of_workload, ~provenance.is_foreign(StudyRow.id)))


def comparable(session: Session, workload: Workload) -> tuple[FinishedTrial, ...]:
    model = codec.columns(workload.model)
    del model["name"]
    settings = {
        "data_fingerprint": workload.data.fingerprint,
        "oversize": workload.oversize,
        "global_batch_samples": workload.global_batch_samples,
        **codec.columns(workload.software),
    }
    query = _trials().join(StudyRow).join(WorkloadRow).join(HardwareRow).join(ModelRow)
    for table, values in ((ModelRow, model), (HardwareRow, workload.hardware.kind), (WorkloadRow, settings)):
        query = query.where(*(getattr(table, name) == value for name, value in values.items()))
    return _finished(session, query.where(~provenance.is_foreign(StudyRow.id)))


def _finished(session: Session, query: Select[TrialRow]) -> tuple[FinishedTrial, ...]:
    """Return the finished trials of a query, oldest first."""
    query = query.where(TrialRow.status == FINISHED).order_by(TrialRow.finished, TrialRow.id)
    return tuple(trial for trial in _readable(session, query) if isinstance(trial, FinishedTrial))


def _readable(session: Session, query: Select[TrialRow]) -> Iterator[RunningTrial | AbandonedTrial | FinishedTrial]:
    return rows.readable(session.scalars(query), codec.trial)


def _records(session: Session, query: Select[StudyRow]) -> tuple[StudyRecord, ...]:
    sources = dict(map(tuple, session.execute(_sourced(query))))
    return tuple(rows.readable(sources, lambda row: codec.study(row, sources[row])))


def _sourced(query: Select[StudyRow]) -> Select[Any]:
    return provenance.with_source(query, StudyRow.id)


def _trials() -> Select[TrialRow]:
    return select(TrialRow).options(*WHOLE_TRIAL)
