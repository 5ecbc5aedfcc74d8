"""Deletion and archiving of studies."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Table,
    delete,
    func,
    or_,
    select,
    tuple_,
    union,
    update,
)

from storage.database import rows
from storage.database.tables import (
    AGENT,
    ATTEMPT,
    BEST_PLAN,
    DELETED,
    LAUNCH,
    LAUNCH_WINDOW,
    NOTE,
    OUTCOME,
    PLAN,
    RUNNING,
    STAGE_MEASUREMENT,
    STUDY,
    TAG,
    TRIAL,
    WORKLOAD,
)
from storage.deletion import Deletion, Use
from storage.errors import StudyInUse
from storage.queries import agents, provenance

# A choice: keys have up to three columns, so 1,500 values, of the 32,766 that SQLite allows in a statement.
_ROWS_AT_ONCE = 500
_LATE = (STUDY, TRIAL, LAUNCH)
"""Tables to whose rows a process may still refer after they are deleted."""


def examine(connection: Connection, ids: Collection[str]) -> Deletion:
    counts = {table: _count(connection, query) for table, query in _rows_of(ids).items()}
    of_studies = select(STUDY).where(STUDY.c.id.in_(ids)).order_by(STUDY.c.started)
    studies = connection.execute(of_studies).mappings().all()
    return Deletion(
        studies=tuple(study["name"] for study in studies),
        trials=counts[TRIAL],
        best_plans=counts[BEST_PLAN],
        plans=counts[PLAN],
        launches=counts[LAUNCH],
        notes=counts[NOTE],
        tags=counts[TAG],
        calibrations=sum(study["calibration_state"] is not None for study in studies),
        heirs=_heirs(connection, ids),
        uses=_uses(connection, ids),
    )


def delete_studies(connection: Connection, ids: Collection[str], gone: Collection[str]) -> Deletion:
    _hold(connection, ids)
    _end_gone(connection, _uses(connection, ids), gone)
    # Uses of the rows are read again once the rows are locked, which two deletions do in the same order.
    for table, query in ((TRIAL, _trials(ids)), (PLAN, _plans(ids))):
        connection.execute(query.with_only_columns(table.c.id).order_by(table.c.id).with_for_update())
    done = examine(connection, ids)
    _end_gone(connection, done.uses, gone)
    now = datetime.now(UTC)
    keys = {table: connection.execute(query).all() for table, query in _rows_of(ids).items()}
    for table, found in keys.items():
        # In parts, since SQLite limits the number of values of a statement.
        for first in range(0, len(found), _ROWS_AT_ONCE):
            part = [tuple(key) for key in found[first : first + _ROWS_AT_ONCE]]
            provenance.forget(connection, table, part)
            connection.execute(delete(table).where(tuple_(*table.primary_key).in_(part)))
            if table in _LATE:
                rows.add(connection, DELETED, [{"kind": table.name, "key": key, "deleted": now} for (key,) in part])
    return done


def withdraw(connection: Connection, study_id: str, agent_id: str) -> None:
    """Delete a study without trials, unless another agent than this one works on it."""
    _hold(connection, [study_id])
    if not _count(connection, _trials([study_id])):
        rows.change(connection, AGENT, agent_id, study_id=None)
        with suppress(StudyInUse):
            delete_studies(connection, [study_id], ())


def archive(connection: Connection, ids: Collection[str], gone: Collection[str]) -> None:
    _hold(connection, ids)
    _end_gone(connection, tuple(searches(connection, ids)), gone)
    # A study that is archived already keeps its time.
    connection.execute(_archived(ids).where(STUDY.c.archived.is_(None)).values(archived=datetime.now(UTC)))


def unarchive(connection: Connection, ids: Collection[str]) -> None:
    _hold(connection, ids)
    connection.execute(_archived(ids).values(archived=None))


def _archived(ids: Collection[str]) -> Any:
    return update(STUDY).where(STUDY.c.id.in_(ids))


def _hold(connection: Connection, ids: Collection[str]) -> None:
    """Lock the studies, and their workloads so that no agent joins them. Raise UnknownRecord."""
    workloads = {rows.get(connection, STUDY, key)["workload_fingerprint"] for key in ids}
    # In order, so that two processes never wait for rows of each other.
    for key in sorted(workloads):
        rows.get(connection, WORKLOAD, key, lock=True)
    for key in sorted(ids):
        rows.get(connection, STUDY, key, lock=True)


def _end_gone(connection: Connection, uses: Sequence[Use], gone: Collection[str]) -> None:
    """End the agents that are gone, so that their late requests are refused. Raise StudyInUse for any other."""
    for use in uses:
        if use.agent.id not in gone:
            host, number = use.agent.machine.partition(" ")[0], use.agent.process.partition(" ")[0]
            raise StudyInUse(f"process {number} on {host} {use.what}; wait for it, or end it first")
    for agent in sorted({use.agent.id for use in uses}):
        agents.end(connection, agent)


def searches(connection: Connection, ids: Collection[str]) -> Iterator[Use]:
    present = agents.present(connection)
    of_studies = select(STUDY.c.id, STUDY.c.name).where(STUDY.c.id.in_(ids))
    names = {row.id: row.name for row in connection.execute(of_studies)}
    running = select(TRIAL.c.agent_id, TRIAL.c.study_id).where(TRIAL.c.study_id.in_(ids), TRIAL.c.status == RUNNING)
    working = {(agent.id, agent.study_id) for agent in present.values() if agent.study_id in names}
    for agent, study in sorted(
        working | {(row.agent_id, row.study_id) for row in connection.execute(running)}, key=str
    ):
        if agent in present:
            yield Use(agent=present[agent], what=f"searches in study {names[study]}")


def _trainings(connection: Connection, ids: Collection[str]) -> Iterator[Use]:
    present = agents.present(connection)
    of_plans = LAUNCH.c.plan_id.in_(_plan_ids(STUDY.c.id.in_(ids)))
    query = select(LAUNCH.c.agent_id, LAUNCH.c.plan_id).where(LAUNCH.c.status == RUNNING, of_plans)
    for agent, plan in connection.execute(query.order_by(LAUNCH.c.started)):
        if agent in present:
            yield Use(agent=present[agent], what=f"trains with plan {plan}, which the study tried")


def _uses(connection: Connection, ids: Collection[str]) -> tuple[Use, ...]:
    return (*searches(connection, ids), *_trainings(connection, ids))


def _heirs(connection: Connection, ids: Collection[str]) -> tuple[str, ...]:
    """Return the names of the studies that began later on the same workloads and counted earlier results."""
    first = (
        select(STUDY.c.workload_fingerprint, func.min(STUDY.c.started).label("started"))
        .where(STUDY.c.id.in_(ids), ~provenance.is_foreign(STUDY.c.id))
        .group_by(STUDY.c.workload_fingerprint)
        .subquery()
    )
    query = (
        select(STUDY.c.name, STUDY.c.settings)
        .join(first, first.c.workload_fingerprint == STUDY.c.workload_fingerprint)
        .where(STUDY.c.id.not_in(ids), STUDY.c.started > first.c.started, ~provenance.is_foreign(STUDY.c.id))
        .order_by(STUDY.c.started)
    )
    return tuple(name for name, settings in connection.execute(query) if not settings.get("fresh"))


def _rows_of(ids: Collection[str]) -> dict[Table, Select[Any]]:
    """Return queries for the keys of all rows to delete; rows come before those that they refer to."""
    trials, plans = _trials(ids), _plans(ids)
    of_trials, of_plans = (query.with_only_columns(query.selected_columns.id) for query in (trials, plans))

    launches = select(LAUNCH.c.id).where(LAUNCH.c.plan_id.in_(of_plans))

    def annotations(table: Table) -> Select[Any]:
        of_study = (table.c.kind == STUDY.name) & table.c.key.in_(ids)
        return select(*table.primary_key).where(or_(of_study, (table.c.kind == PLAN.name) & table.c.key.in_(of_plans)))

    return {
        **{
            table: select(*table.primary_key).where(table.c.trial_id.in_(of_trials))
            for table in (OUTCOME, ATTEMPT, STAGE_MEASUREMENT)
        },
        NOTE: annotations(NOTE),
        TAG: annotations(TAG),
        LAUNCH_WINDOW: select(*LAUNCH_WINDOW.primary_key).where(LAUNCH_WINDOW.c.launch_id.in_(launches)),
        LAUNCH: launches,
        BEST_PLAN: select(BEST_PLAN.c.study_id).where(BEST_PLAN.c.study_id.in_(ids)),
        TRIAL: of_trials,
        PLAN: of_plans,
        STUDY: select(STUDY.c.id).where(STUDY.c.id.in_(ids)),
    }


def _trials(ids: Collection[str]) -> Select[Any]:
    return select(TRIAL).where(TRIAL.c.study_id.in_(ids))


def _plans(ids: Collection[str]) -> Select[Any]:
    """Select the plans of the studies that no other study tried."""
    return select(PLAN).where(
        PLAN.c.id.in_(_plan_ids(STUDY.c.id.in_(ids))), PLAN.c.id.not_in(_plan_ids(STUDY.c.id.not_in(ids)))
    )


def _plan_ids(condition: ColumnElement[bool]) -> Any:
    """Select the ids of the plans that studies tried."""
    return union(
        *(
            select(table.c.plan_id).join(STUDY, STUDY.c.id == table.c.study_id).where(condition)
            for table in (TRIAL, BEST_PLAN)
        )
    )


def _count(connection: Connection, query: Select[Any]) -> int:
    return connection.scalar(select(func.count()).select_from(query.subquery())) or 0
