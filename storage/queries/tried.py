"""Tried plans, found by the beginning of their id, with the most relevant study."""

import difflib
from collections.abc import Mapping
from operator import itemgetter
from typing import Any, TypeAlias

from sqlalchemy import Select, select, union
from sqlalchemy.orm import Session

from storage.database import rows
from storage.database.tables import BestPlanRow, BundleRow, PlanRow, StudyRow, TrialRow, WorkloadRow
from storage.errors import AmbiguousId, UnknownPlan
from storage.queries import codec, plans, provenance, studies
from storage.records import TriedPlan
from storage.validity import Verdict, validity
from trials.workload import Workload

_SHOWN = 5
_Sources: TypeAlias = Mapping[StudyRow, str | None]
"""Studies, and the databases that they were imported from."""


def find(session: Session, id_prefix: str, now: Workload | None) -> TriedPlan:
    plan = rows.get(session, PlanRow, _id(session, id_prefix))
    sources: _Sources = dict(map(tuple, session.execute(_studies(plan.id))))

    def tried(study: StudyRow) -> TriedPlan:
        return TriedPlan(
            plan=codec.plan(plan),
            workload=codec.workload(rows.get(session, WorkloadRow, study.workload_fingerprint)),
            study=codec.study(study, sources[study]),
            winner=plans.of_study(session, study.id),
            trials=tuple(trial for trial in studies.trials(session, study.id) if trial.plan.id == plan.id),
        )

    ordered = list(sources if now is None else _by_validity(session, sources, now))
    return next(rows.readable(ordered, tried), None) or tried(ordered[0])  # which raises what is wrong with its rows


def _id(session: Session, id_prefix: str) -> str:
    """Return the only plan id that begins with `id_prefix`. Raises UnknownPlan and AmbiguousId."""
    prefix = id_prefix.lower()
    known = union(select(TrialRow.plan_id), select(BestPlanRow.plan_id)).subquery()
    ids = select(known.c.plan_id).order_by(known.c.plan_id)
    matches = session.scalars(ids.where(known.c.plan_id.startswith(prefix, autoescape=True)).limit(_SHOWN + 1)).all()
    if not matches:
        near = difflib.get_close_matches(prefix, session.scalars(ids).all(), n=3, cutoff=0.0)  # some, however unlike
        advice = f"near ids are {', '.join(near)}" if near else "no study has tried a plan yet; run a search first"
        raise UnknownPlan(f"no plan begins with {id_prefix!r}; {advice}")
    if len(matches) > 1:
        more = ", ..." if len(matches) > _SHOWN else ""
        raise AmbiguousId(f"several plans begin with {id_prefix!r}: {', '.join(matches[:_SHOWN])}{more}; add digits")
    (found,) = matches
    return str(found)


def _studies(plan_id: str) -> Select[Any]:
    """Select (study that tried the plan, its source): those that the plan won first, then local, then newest."""
    tried = select(TrialRow.study_id).where(TrialRow.plan_id == plan_id)
    won = select(BestPlanRow.study_id).where(BestPlanRow.plan_id == plan_id)
    query = select(StudyRow).where(StudyRow.id.in_(union(tried, won)))
    order = StudyRow.id.not_in(won), BundleRow.source.is_not(None), StudyRow.started.desc()
    return provenance.with_source(query, StudyRow.id).order_by(*order)


def _by_validity(session: Session, sources: _Sources, now: Workload) -> list[StudyRow]:
    """Sort the studies by their validity for the workload, the best first, and keep the order otherwise."""

    def ranked(study: StudyRow) -> tuple[int, StudyRow]:
        then = codec.workload(rows.get(session, WorkloadRow, study.workload_fingerprint))
        return list(Verdict).index(validity(then, now, imported_from=sources[study]).verdict), study

    in_order = [study for _, study in sorted(rows.readable(sources, ranked), key=itemgetter(0))]
    return in_order or list(sources)
