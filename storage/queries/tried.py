"""Tried plans, found by the beginning of their id, with the most relevant study."""

from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Select, select, union

from storage.annotation import Subject
from storage.database import rows
from storage.database.rows import Row
from storage.database.tables import BEST_PLAN, BUNDLE, PLAN, STUDY, TRIAL
from storage.errors import AmbiguousId, UnknownPlan, UnknownRecord
from storage.queries import codec, plans, provenance, studies, workloads
from storage.records import TriedPlan
from storage.validity import Now, Verdict, parallel_of, validity

# A choice: ids of a message, which stays one line.
_SHOWN = 5
_NEAR = 3
# A choice: ids are random, and half of the digits of two of them may agree in order by chance.
_ALIKE = 0.7
"""Least similarity of a text to the beginning of an id that may be meant, as difflib measures it."""


def find(connection: Connection, id_prefix: str, now: Now | None = None, *, study_id: str | None = None) -> TriedPlan:
    """Return the tried plan whose id begins with `id_prefix`, with its record in one study: `study_id` if given.

    Of several studies, prefer the one whose workload is most valid `now`, then one that the plan won, then local
    studies to imported ones, then the newest. Raise UnknownPlan, with the nearest ids, and AmbiguousId.
    """
    plan = rows.get(connection, PLAN, _id(connection, id_prefix))
    query = _studies(plan["id"])
    found = connection.execute(query if study_id is None else query.where(STUDY.c.id == study_id)).mappings().all()
    if not found:
        raise UnknownPlan(
            f"study {study_id} did not try plan {plan['id']}; `autotune studies STUDY` lists those it did"
        )

    def tried(row: Row) -> TriedPlan:
        study = codec.study(row)
        return TriedPlan(
            plan=codec.plan(plan),
            workload=study.named(workloads.get(connection, study.workload_fingerprint)),
            study=study,
            winner=plans.of_study(connection, study.id),
            trials=tuple(trial for trial in studies.trials(connection, study.id) if trial.plan.id == plan["id"]),
        )

    ordered = found if now is None else _by_validity(connection, found, now)
    readable = rows.readable(STUDY, ordered, tried)
    return next(readable, None) or tried(ordered[0])  # which raises what is wrong with its rows


def subject(connection: Connection, name: str) -> Subject:
    """Return the study whose name or id, or the tried plan whose id, begins with `name`.

    Raise UnknownRecord and AmbiguousId.
    """
    plan, study = None, None
    with suppress(UnknownPlan):
        plan = _id(connection, name)
    with suppress(UnknownRecord):
        study = studies.find(connection, name)
    if study is not None and plan is not None:
        raise AmbiguousId(f"both study {study.name} and plan {plan} begin with {name!r}; add digits")
    if study is not None:
        return Subject(kind="study", id=study.id, name=study.name)
    if plan is not None:
        return Subject(kind="plan", id=plan, name=plan)
    raise UnknownRecord(
        f"no study and no plan begins with {name!r}; `autotune studies --archived` and `autotune plans --archived` "
        "list all"
    )


def _id(connection: Connection, id_prefix: str) -> str:
    """Return the only plan id that begins with `id_prefix`. Raise UnknownPlan and AmbiguousId."""
    if not id_prefix:  # it would be the beginning of every id
        raise UnknownPlan("the id of a plan is empty; `autotune plans --archived` lists all winners")
    prefix = id_prefix.lower()
    known = union(select(TRIAL.c.plan_id), select(BEST_PLAN.c.plan_id)).subquery()
    ids = select(known.c.plan_id).order_by(known.c.plan_id)
    matches = connection.scalars(ids.where(known.c.plan_id.startswith(prefix, autoescape=True)).limit(_SHOWN + 1)).all()
    if not matches:
        import difflib  # noqa: PLC0415 - for this message alone

        every = connection.scalars(ids).all()
        heads = difflib.get_close_matches(prefix, {each[: len(prefix)] for each in every}, n=_NEAR, cutoff=_ALIKE)
        near = [each for head in heads for each in every if each.startswith(head)][:_NEAR]
        advice = (
            "`autotune plans --archived` lists all winners; a plan that no trial ran is given as a file with its "
            "`plan` of `autotune predict JOB --json`"
        )
        if near:
            advice = f"near ids are {', '.join(near)}"
        if not every:
            advice = "no study has tried a plan yet; run a search first"
        raise UnknownPlan(f"no plan begins with {id_prefix!r}; {advice}")
    if len(matches) > 1:
        more = ", ..." if len(matches) > _SHOWN else ""
        raise AmbiguousId(f"several plans begin with {id_prefix!r}: {', '.join(matches[:_SHOWN])}{more}; add digits")
    (found,) = matches
    return str(found)


def _studies(plan_id: str) -> Select[Any]:
    """Select (study that tried the plan, its source).

    Those that are not archived come first, then those that the plan won, then local ones, then the newest.
    """
    tried = select(TRIAL.c.study_id).where(TRIAL.c.plan_id == plan_id)
    won = select(BEST_PLAN.c.study_id).where(BEST_PLAN.c.plan_id == plan_id)
    query = select(STUDY).where(STUDY.c.id.in_(union(tried, won)))
    order = STUDY.c.archived.is_not(None), STUDY.c.id.not_in(won), BUNDLE.c.source.is_not(None), STUDY.c.started.desc()
    return provenance.with_source(query, STUDY.c.id).order_by(*order)


def _by_validity(connection: Connection, found: Sequence[Row], now: Now) -> Sequence[Row]:
    """Sort the studies by the validity of their workloads now, the best first, and keep the order otherwise."""

    def ranked(row: Row) -> tuple[int, Row]:
        then = workloads.get(connection, row[STUDY.c.workload_fingerprint])
        wanted = now(then, parallel_of(row[STUDY.c.settings]))
        return list(Verdict).index(validity(then, wanted, imported_from=row[BUNDLE.c.source]).verdict), row

    in_order = [row for _, row in sorted(rows.readable(STUDY, found, ranked), key=itemgetter(0))]
    return in_order or found
