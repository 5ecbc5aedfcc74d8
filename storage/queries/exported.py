"""The rows that a bundle of studies holds."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Column, Select, Table, select, union

from storage.database.tables import (
    ATTEMPT,
    BEST_PLAN,
    DATA_PROFILE,
    HARDWARE,
    LAUNCH,
    LAUNCH_WINDOW,
    LAYER_PROFILE,
    MODEL,
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

TABLES: tuple[Table, ...] = (
    HARDWARE,
    MODEL,
    DATA_PROFILE,
    WORKLOAD,
    LAYER_PROFILE,
    PLAN,
    STUDY,
    TRIAL,
    OUTCOME,
    ATTEMPT,
    STAGE_MEASUREMENT,
    BEST_PLAN,
    LAUNCH,
    LAUNCH_WINDOW,
    NOTE,
    TAG,
)
"""Tables in an order in which rows follow those that they refer to."""


def queries(ids: Sequence[str]) -> dict[Table, Select[Any]]:
    """Return the query for the rows of each table that belong to the studies, in the order of `TABLES`."""
    of_workloads = select(STUDY.c.workload_fingerprint).where(STUDY.c.id.in_(ids))
    workloads = select(WORKLOAD).where(WORKLOAD.c.fingerprint.in_(of_workloads))

    def of_workload(table: Table, reference: Column[Any]) -> Select[Any]:
        key = table.c.fingerprint
        return select(table).where(key.in_(workloads.with_only_columns(reference))).order_by(key)

    trials = select(TRIAL).where(TRIAL.c.study_id.in_(ids))
    of_trials = trials.with_only_columns(TRIAL.c.id)
    best = select(BEST_PLAN).where(BEST_PLAN.c.study_id.in_(ids))
    of_plans = union(trials.with_only_columns(TRIAL.c.plan_id), best.with_only_columns(BEST_PLAN.c.plan_id))
    plans = select(PLAN).where(PLAN.c.id.in_(of_plans))
    # Those of other plans would not be found in another database, nor deleted with the studies.
    launches = select(LAUNCH).where(
        LAUNCH.c.plan_id.in_(of_plans),
        LAUNCH.c.workload_fingerprint.in_(of_workloads),
        LAUNCH.c.status != RUNNING,
    )

    def annotations(table: Table) -> Select[Any]:
        of_study = (table.c.kind == STUDY.name) & table.c.key.in_(ids)
        of_plan = (table.c.kind == PLAN.name) & table.c.key.in_(plans.with_only_columns(PLAN.c.id))
        return select(table).where(of_study | of_plan).order_by(*table.primary_key)

    return {
        HARDWARE: of_workload(HARDWARE, WORKLOAD.c.hardware_fingerprint),
        MODEL: of_workload(MODEL, WORKLOAD.c.model_fingerprint),
        DATA_PROFILE: of_workload(DATA_PROFILE, WORKLOAD.c.data_fingerprint),
        WORKLOAD: workloads.order_by(WORKLOAD.c.fingerprint),
        LAYER_PROFILE: select(LAYER_PROFILE)
        .join(
            WORKLOAD,
            (WORKLOAD.c.hardware_fingerprint == LAYER_PROFILE.c.hardware_fingerprint)
            & (WORKLOAD.c.model_fingerprint == LAYER_PROFILE.c.model_fingerprint),
        )
        .where(WORKLOAD.c.fingerprint.in_(of_workloads))
        .distinct(),
        PLAN: plans.order_by(PLAN.c.id),
        STUDY: select(STUDY).where(STUDY.c.id.in_(ids)).order_by(STUDY.c.started),
        TRIAL: trials.order_by(TRIAL.c.study_id, TRIAL.c.number),
        OUTCOME: select(OUTCOME).where(OUTCOME.c.trial_id.in_(of_trials)),
        ATTEMPT: select(ATTEMPT).where(ATTEMPT.c.trial_id.in_(of_trials)),
        STAGE_MEASUREMENT: select(STAGE_MEASUREMENT).where(STAGE_MEASUREMENT.c.trial_id.in_(of_trials)),
        BEST_PLAN: best,
        LAUNCH: launches.order_by(LAUNCH.c.started),
        LAUNCH_WINDOW: select(LAUNCH_WINDOW).where(
            LAUNCH_WINDOW.c.launch_id.in_(launches.with_only_columns(LAUNCH.c.id))
        ),
        NOTE: annotations(NOTE),
        TAG: annotations(TAG),
    }
