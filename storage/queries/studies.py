"""Studies and their trials."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from sqlalchemy import ColumnElement, Connection, Select, func, insert, or_, select

from storage.database import rows
from storage.database.tables import (
    ABANDONED,
    ATTEMPT,
    FINISHED,
    HARDWARE,
    MODEL,
    OUTCOME,
    PLAN,
    RUNNING,
    STAGE_MEASUREMENT,
    STUDY,
    TRIAL,
    WORKLOAD,
)
from storage.errors import AlreadyFinished, AmbiguousId, UnfinishedStudy, UnknownRecord
from storage.queries import agents, annotations, codec, provenance
from storage.records import (
    STUDY_DIGITS,
    AbandonedTrial,
    FinishedTrial,
    RunningTrial,
    StudyRecord,
    TrialResult,
    TrialSummary,
    study_name,
)
from trials.plan import Plan
from trials.workload import Workload

# A choice: names of a message, which stays one line.
_SHOWN = 5
# A choice: one query reads the attempts of this many trials, whose documents take a few MB.
_ROWS_AT_ONCE = 500
_COUNTING = ~provenance.is_foreign(STUDY.c.id), STUDY.c.archived.is_(None)
"""Conditions on studies whose results later searches use."""


def create(
    connection: Connection,
    workload_fingerprint: str,
    settings: Mapping[str, object],
    seed: int,
    *,
    agent_id: str | None = None,
    model_name: str | None = None,
) -> StudyRecord:
    """Create a study that starts now, on which the agent works; `settings` are JSON values.

    It is named by `model_name`: the model that is stored may have been of another folder of the same architecture.
    """
    # The lock keeps two studies of a workload from getting the same start, by which they are ordered.
    rows.get(connection, WORKLOAD, workload_fingerprint, lock=True)
    if model_name is None:
        stored = select(MODEL.c.name).join(WORKLOAD).where(WORKLOAD.c.fingerprint == workload_fingerprint)
        model_name = connection.scalars(stored).one()
    last = connection.scalar(
        select(func.max(STUDY.c.started)).where(STUDY.c.workload_fingerprint == workload_fingerprint)
    )
    now = datetime.now(UTC)
    identity = uuid4().hex
    study = StudyRecord(
        id=identity,
        name=study_name(model_name, identity),
        workload_fingerprint=workload_fingerprint,
        seed=seed,
        settings=dict(settings),
        started=now if last is None else max(now, last + timedelta(microseconds=1)),  # clocks are set back
        finished=None,
    )
    values = codec.columns(study)
    # No column: it follows from the provenance.
    del values["imported_from"]
    connection.execute(insert(STUDY).values(values))
    agents.work_on(connection, agent_id, study.id)
    return study


def join(
    connection: Connection,
    workload_fingerprint: str,
    settings: Mapping[str, object],
    seed: int,
    same: Callable[[StudyRecord], bool],
    *,
    agent_id: str | None = None,
    model_name: str | None = None,
) -> StudyRecord:
    """Return the newest study, or an unfinished one, that `same` accepts, else create one; the agent works on it.

    Studies for other trainers do not count.
    If several processes call this at once, one of them creates the study and all return it. Archived studies do
    not count, here and in all methods but those that name a study or plan, and those with `archived`.
    """
    rows.get(connection, WORKLOAD, workload_fingerprint, lock=True)  # so that no two processes create one
    every = map(codec.study, connection.execute(_own(workload_fingerprint)).mappings())
    found = (study for study in every if study.settings.get("trainer") == settings.get("trainer"))
    going_on = (study for number, study in enumerate(found) if number == 0 or study.finished is None)
    study = next(filter(same, going_on), None)
    if study is None:
        return create(connection, workload_fingerprint, settings, seed, agent_id=agent_id, model_name=model_name)
    agents.work_on(connection, agent_id, study.id)
    return study


def get(connection: Connection, study_id: str) -> StudyRecord:
    rows.get(connection, STUDY, study_id)
    return codec.study(connection.execute(_sourced(select(STUDY).where(STUDY.c.id == study_id))).mappings().one())


def listed(
    connection: Connection,
    *,
    model_name: str | None = None,
    tag: str | None = None,
    archived: bool = False,
    limit: int | None = None,
) -> tuple[StudyRecord, ...]:
    """Return the studies that meet all given conditions, newest first; `archived` adds the archived ones.

    `model_name` matches any part of the stored one, in any case.
    """
    query = select(STUDY).order_by(STUDY.c.started.desc(), STUDY.c.id).limit(limit)
    if not archived:
        query = query.where(STUDY.c.archived.is_(None))
    if tag is not None:
        query = query.where(annotations.has_tag(STUDY, STUDY.c.id, tag))
    if model_name is not None:
        query = query.where(is_of_model(model_name))
    return _records(connection, query)


def is_of_model(name: str) -> ColumnElement[bool]:
    """Return whether the model's name in a study contains `name`, in any case."""
    # `_` stands for any character in LIKE: those at the end are the id's digits, which do not count.
    escaped = re.sub(r"([/%_])", r"/\1", name)
    return STUDY.c.name.ilike(f"%{escaped}%-{'_' * STUDY_DIGITS}", escape="/")


def find(connection: Connection, name: str) -> StudyRecord:
    """Return the study whose name or id begins with `name`. Raise UnknownRecord and AmbiguousId."""
    if not name:  # it would be the beginning of every name
        raise UnknownRecord("the name of a study is empty; `autotune studies --archived` lists all")
    named = or_(STUDY.c.name.istartswith(name, autoescape=True), STUDY.c.id.startswith(name.lower(), autoescape=True))
    found = _records(connection, select(STUDY).where(named).order_by(STUDY.c.name).limit(_SHOWN))
    if not found:
        raise UnknownRecord(
            f"no study has a name or id that begins with {name!r}; `autotune studies --archived` lists all"
        )
    if len(found) > 1:
        raise AmbiguousId(
            f"several studies begin with {name!r}: {', '.join(study.name for study in found)}; add digits"
        )
    return found[0]


def check_finished(connection: Connection, study_id: str) -> None:
    row = rows.get(connection, STUDY, study_id)
    if row["finished"] is None:
        raise UnfinishedStudy(f"study {row['name']} has no winner yet; run `autotune tune JOB` until its end first")


def _own(workload_fingerprint: str) -> Select[Any]:
    """Select the local studies of a workload that are not archived, newest first."""
    query = select(STUDY).where(STUDY.c.workload_fingerprint == workload_fingerprint, *_COUNTING)
    return query.order_by(STUDY.c.started.desc())


def conclude(connection: Connection, study_id: str, calibration_state: str, agent_id: str) -> bool:
    """Finish the study, and return True, if it is unfinished and this agent leads it."""
    row = rows.get(connection, STUDY, study_id, lock=True)
    if row["finished"] is not None or row["leader_id"] != agent_id:
        return False
    rows.change(connection, STUDY, study_id, finished=datetime.now(UTC), calibration_state=calibration_state)
    return True


def calibration_state(connection: Connection, workload: Workload) -> str | None:
    """Return the calibration state of the last finished study with this model family, dtype and kind of device."""
    like = {"family": workload.model.family, "dtype": workload.model.dtype}
    query = select(STUDY.c.calibration_state).select_from(STUDY.join(WORKLOAD).join(HARDWARE).join(MODEL))
    for table, values in ((MODEL, like), (HARDWARE, workload.hardware.kind)):
        query = query.where(*(table.c[name] == value for name, value in values.items()))
    # False sorts before True: local studies come before imported ones.
    ours_first = provenance.is_foreign(STUDY.c.id), STUDY.c.finished.desc()
    query = query.where(STUDY.c.calibration_state.is_not(None), STUDY.c.archived.is_(None))
    return connection.scalar(query.order_by(*ours_first).limit(1))


def start_trial(
    connection: Connection,
    study_id: str,
    plan: Plan,
    role: str,
    parameters: Mapping[str, object] = MappingProxyType({}),
    *,
    agent_id: str | None = None,
) -> RunningTrial:
    """Start a trial with the next number of the study, also while other processes start trials of it.

    Raise Superseded if the agent has ended.
    """
    rows.get(connection, STUDY, study_id, lock=True)  # so that no two trials take the same number
    agents.check(connection, agent_id)
    highest = connection.scalar(select(func.max(TRIAL.c.number)).where(TRIAL.c.study_id == study_id))
    rows.ensure(connection, PLAN, codec.plan_row(plan))
    trial = RunningTrial(
        id=uuid4().hex,
        study_id=study_id,
        number=0 if highest is None else highest + 1,
        plan=plan,
        role=role,
        parameters=dict(parameters),
        started=datetime.now(UTC),
        agent_id=agent_id,
    )
    values = codec.columns(trial)
    del values["plan"]
    connection.execute(insert(TRIAL).values(**values, plan_id=plan.id, status=RUNNING))
    return trial


def is_taken(connection: Connection, study_id: str, plan: Plan, known: int) -> bool:
    """Return whether a trial of the plan runs, or more than `known` are finished.

    Locks the study, so that the answer holds until the transaction ends.
    """
    rows.get(connection, STUDY, study_id, lock=True)
    of_plan = select(TRIAL.c.status).where(TRIAL.c.study_id == study_id, TRIAL.c.plan_id == plan.id)
    found = connection.scalars(of_plan).all()
    return RUNNING in found or found.count(FINISHED) > known


def finish_trial(connection: Connection, result: TrialResult) -> None:
    """Store a result, also of an abandoned trial. It never changes; storing the same one again has no effect.

    Raise AlreadyFinished if the trial has a different result.
    """
    row = rows.get(connection, TRIAL, result.trial_id, lock=True)
    # Read after the wait for the lock: PostgreSQL then reads the locked row anew, but no row that is joined with it.
    (stored,) = whole_trials(connection, rows.whole(TRIAL).where(TRIAL.c.id == result.trial_id))
    if stored[OUTCOME.c.trial_id] is not None:
        if codec.result(stored) != result:
            raise AlreadyFinished(f"trial {result.trial_id} already has another result, which stays; start a new trial")
        return
    given_up = row["finished"] if row["status"] == ABANDONED else row["given_up"]
    rows.change(connection, TRIAL, result.trial_id, status=FINISHED, finished=result.finished, given_up=given_up)
    rows.add(connection, OUTCOME, [codec.outcome_row(result)])
    rows.add(connection, ATTEMPT, codec.attempt_rows(result))
    rows.add(connection, STAGE_MEASUREMENT, codec.stage_rows(result.trial_id, result.outcome))


def abandon_trial(connection: Connection, trial_id: str) -> None:
    """Mark a running trial, whose process is gone, as abandoned; a finished trial stays finished."""
    row = rows.get(connection, TRIAL, trial_id, lock=True)
    if row["status"] == RUNNING:
        rows.change(connection, TRIAL, trial_id, status=ABANDONED, finished=datetime.now(UTC))


def running(connection: Connection) -> tuple[RunningTrial, ...]:
    """Return the running trials of all studies, in order of start."""
    query = rows.whole(TRIAL).where(TRIAL.c.status == RUNNING).order_by(TRIAL.c.started, TRIAL.c.number)
    return tuple(trial for trial in _readable(connection, query) if isinstance(trial, RunningTrial))


def trials(
    connection: Connection, study_id: str, *, known: Collection[str] = ()
) -> tuple[RunningTrial | AbandonedTrial | FinishedTrial, ...]:
    """Return the trials of the study but those whose ids are `known`, in order of number.

    Empty for an unknown study.
    """
    query = rows.whole(TRIAL).where(TRIAL.c.study_id == study_id, TRIAL.c.id.not_in(known)).order_by(TRIAL.c.number)
    return tuple(_readable(connection, query))


def summaries(connection: Connection, *study_ids: str) -> tuple[TrialSummary, ...]:
    """Return summaries of the finished trials of all these studies, oldest first."""
    query = select(TRIAL.c.id, *codec.SUMMARY.values()).join(OUTCOME).where(TRIAL.c.study_id.in_(study_ids))
    found = connection.execute(query.order_by(TRIAL.c.finished, TRIAL.c.id)).mappings()
    return tuple(rows.readable(TRIAL, found, codec.summary))


def answers(
    connection: Connection, workload_fingerprint: str, same: Callable[[StudyRecord], bool] = lambda _: True
) -> tuple[FinishedTrial, ...]:
    """Return the finished trials on exactly this workload, oldest first, which need no second run.

    They are those of the studies that `same` accepts, without imported and archived ones.
    """
    every = rows.readable(STUDY, connection.execute(_own(workload_fingerprint)).mappings(), codec.study)
    return _finished(connection, rows.whole(TRIAL).where(TRIAL.c.study_id.in_([one.id for one in every if same(one)])))


def comparable(connection: Connection, workload: Workload) -> tuple[tuple[StudyRecord, FinishedTrial], ...]:
    """Return the finished trials, oldest first, whose measurements are informative for this workload.

    Each comes with its study, whose settings may differ.

    Only the name of the model, the memory limit, the number of devices (see `Hardware.learns_from`) and the rest of
    the machine may differ.
    """
    every = rows.readable(HARDWARE, connection.execute(select(HARDWARE)).mappings(), codec.hardware)
    alike = [hardware.fingerprint for hardware in every if workload.hardware.learns_from(hardware)]
    model = codec.columns(workload.model)
    del model["name"]
    settings = {
        "data_fingerprint": workload.data.fingerprint,
        "oversize": workload.oversize,
        "global_batch_samples": workload.global_batch_samples,
        **codec.columns(workload.software),
    }
    query = (
        select(STUDY)
        .join(WORKLOAD, WORKLOAD.c.fingerprint == STUDY.c.workload_fingerprint)
        .join(MODEL, MODEL.c.fingerprint == WORKLOAD.c.model_fingerprint)
        .where(WORKLOAD.c.hardware_fingerprint.in_(alike), *_COUNTING)
    )
    for table, values in ((MODEL, model), (WORKLOAD, settings)):
        query = query.where(*(table.c[name] == value for name, value in values.items()))
    found = {study.id: study for study in rows.readable(STUDY, connection.execute(query).mappings(), codec.study)}
    of_studies = rows.whole(TRIAL).where(TRIAL.c.study_id.in_(found))
    return tuple((found[trial.study_id], trial) for trial in _finished(connection, of_studies))


def _finished(connection: Connection, query: Select[Any]) -> tuple[FinishedTrial, ...]:
    """Return the finished trials of a query, oldest first."""
    query = query.where(TRIAL.c.status == FINISHED).order_by(TRIAL.c.finished, TRIAL.c.id)
    return tuple(trial for trial in _readable(connection, query) if isinstance(trial, FinishedTrial))


def _readable(connection: Connection, query: Select[Any]) -> Iterator[RunningTrial | AbandonedTrial | FinishedTrial]:
    return rows.readable(TRIAL, whole_trials(connection, query), codec.trial)


def whole_trials(connection: Connection, query: Select[Any]) -> Iterator[rows.Row]:
    """Yield the rows of a query for whole trials, each with the rows of its attempts by `ATTEMPT`."""
    columns = tuple(query.selected_columns)
    for part in connection.execute(query).partitions(_ROWS_AT_ONCE):
        found = [dict(zip(columns, row, strict=True)) for row in part]
        attempts: dict[str, list[rows.Row]] = {row[TRIAL.c.id]: [] for row in found}
        of_trials = select(ATTEMPT).where(ATTEMPT.c.trial_id.in_(attempts)).order_by(ATTEMPT.c.number)
        for attempt in connection.execute(of_trials).mappings():
            attempts[attempt[ATTEMPT.c.trial_id]].append(attempt)
        yield from ({**row, ATTEMPT: attempts[row[TRIAL.c.id]]} for row in found)


def _records(connection: Connection, query: Select[Any]) -> tuple[StudyRecord, ...]:
    return tuple(rows.readable(STUDY, connection.execute(_sourced(query)).mappings(), codec.study))


def _sourced(query: Select[Any]) -> Select[Any]:
    return provenance.with_source(query, STUDY.c.id)
