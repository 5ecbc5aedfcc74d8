"""The winners of studies: kept, listed, found by the beginning of their id, and the nearest to a workload."""

import difflib
from bisect import insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from sqlalchemy import Select, exists, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session
from sqlalchemy.sql.elements import ColumnElement

from storage import codec, provenance, rows, workloads
from storage.codec import Histogram
from storage.errors import AmbiguousId, UnknownPlan
from storage.nearness import FARTHEST_HISTOGRAM, Difference, Fields, differences, distance
from storage.records import BestPlan
from storage.tables import BestPlanRow, BundleRow, DataProfileRow, HardwareRow, ModelRow, StudyRow, WorkloadRow
from trials.workload import Hardware, ModelShape, Software

_HISTOGRAM, _FINGERPRINT = "data.histogram", "fingerprint"
_SHOWN = 5
_COLUMNS: dict[str, InstrumentedAttribute[Any]] = {
    _FINGERPRINT: WorkloadRow.fingerprint,
    **{name: getattr(WorkloadRow, name) for name in ("oversize", "global_batch_samples", "memory_limit_bytes")},
    **{f"software.{field.name}": getattr(WorkloadRow, field.name) for field in fields(Software)},
    **{f"hardware.{field.name}": getattr(HardwareRow, field.name) for field in fields(Hardware)},
    **{f"model.{field.name}": getattr(ModelRow, field.name) for field in fields(ModelShape)},
}
"""The fields of a workload but for its data, by dotted name; of the data only the histogram has a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearPlan:
    """A winner, and how far its workload is from the one asked for."""

    best: BestPlan
    differences: tuple[Difference, ...]
    """The weightiest first."""
    distance: float
    """Their sum; 0 when nothing that counts differs."""


def save(session: Session, best: BestPlan) -> None:
    rows.get(session, StudyRow, best.study_id, lock=True)
    workloads.add(session, best.workload)
    rows.ensure(session, codec.plan_row(best.plan))
    session.merge(codec.best_plan_row(best))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which winners a query is for; a name may be a part of the stored one, in either case."""

    hardware_fingerprint: str | None = None
    hardware_name: str | None = None
    model_name: str | None = None
    workload_fingerprint: str | None = None

    def conditions(self) -> Iterator[ColumnElement[bool]]:
        if self.hardware_fingerprint is not None:
            yield WorkloadRow.hardware_fingerprint == self.hardware_fingerprint
        if self.hardware_name is not None:
            yield HardwareRow.device_name.icontains(self.hardware_name, autoescape=True)
        if self.model_name is not None:
            yield ModelRow.name.icontains(self.model_name, autoescape=True)
        if self.workload_fingerprint is not None:
            yield WorkloadRow.fingerprint == self.workload_fingerprint


def listed(session: Session, wanted: Wanted, limit: int | None) -> tuple[BestPlan, ...]:
    newest = func.max(StudyRow.started).over(partition_by=BestPlanRow.workload_fingerprint)
    query = (
        select(BestPlanRow)
        .join(StudyRow, StudyRow.id == BestPlanRow.study_id)
        .join(WorkloadRow, WorkloadRow.fingerprint == BestPlanRow.workload_fingerprint)
        .join(HardwareRow, HardwareRow.fingerprint == WorkloadRow.hardware_fingerprint)
        .join(ModelRow, ModelRow.fingerprint == WorkloadRow.model_fingerprint)
        .where(*wanted.conditions())
        .order_by(newest.desc(), BestPlanRow.workload_fingerprint, BestPlanRow.epoch_seconds)
        .limit(limit)
    )
    return _read(session, query)


def last(session: Session, workload_fingerprint: str) -> BestPlan | None:
    query = select(BestPlanRow).join(StudyRow).where(StudyRow.workload_fingerprint == workload_fingerprint)
    query = query.where(~provenance.is_foreign(StudyRow.id)).order_by(StudyRow.started.desc()).limit(1)
    return next(iter(_read(session, query)), None)


def of_study(session: Session, study_id: str) -> BestPlan | None:
    return next(iter(_read(session, select(BestPlanRow).where(BestPlanRow.study_id == study_id))), None)


def nearest(session: Session, now: Fields, wanted: Wanted, limit: int) -> tuple[NearPlan, ...]:
    told = _distances(session, now, wanted, limit)
    query = select(BestPlanRow).where(BestPlanRow.workload_fingerprint.in_(told))
    best_plans = ((best, told[best.workload.fingerprint]) for best in _read(session, query))
    found = [NearPlan(best=best, differences=each, distance=distance(each)) for best, each in best_plans]
    return tuple(sorted(found, key=lambda near: (near.distance, near.best.epoch_seconds))[:limit])


def _distances(session: Session, now: Fields, wanted: Wanted, limit: int) -> dict[str, tuple[Difference, ...]]:
    """The differences of the nearest workloads, by fingerprint.

    Histograms are long, so only those are read that can bring their workload among the nearest.
    """
    ranked = _ranked(session, {name: value for name, value in now.items() if name != _HISTOGRAM}, wanted)
    if _HISTOGRAM not in now:
        return {each.fingerprint: each.differences for each in ranked[:limit]}
    farthest = ranked[min(limit, len(ranked)) - 1].distance + FARTHEST_HISTOGRAM if ranked else 0.0
    near = [each for each in ranked if each.distance <= farthest]
    histograms = _histograms(session, [each.fingerprint for each in near])
    whole: list[_Ranked] = []
    for each in near:
        if len(whole) >= limit and each.distance > whole[limit - 1].distance:
            break
        then = {_HISTOGRAM: histograms[each.fingerprint]}
        insort(whole, _rank(each.fingerprint, (*each.differences, *differences(then, {_HISTOGRAM: now[_HISTOGRAM]}))))
    return {each.fingerprint: each.differences for each in whole[:limit]}


class _Ranked(NamedTuple):
    """A workload; tuples of them sort by distance."""

    distance: float
    fingerprint: str
    differences: tuple[Difference, ...]


def _rank(fingerprint: str, found: tuple[Difference, ...]) -> _Ranked:
    return _Ranked(distance(found), fingerprint, tuple(sorted(found, key=lambda one: -one.distance)))


def _ranked(session: Session, now: Fields, wanted: Wanted) -> list[_Ranked]:
    """Every workload with a winner, the nearest first."""
    query = (
        select(*_COLUMNS.values())
        .join(HardwareRow, HardwareRow.fingerprint == WorkloadRow.hardware_fingerprint)
        .join(ModelRow, ModelRow.fingerprint == WorkloadRow.model_fingerprint)
        .where(exists().where(BestPlanRow.workload_fingerprint == WorkloadRow.fingerprint), *wanted.conditions())
    )
    rows_of = (dict(zip(_COLUMNS, row, strict=True)) for row in session.execute(query))
    return sorted(_rank(str(then[_FINGERPRINT]), differences(then, now)) for then in rows_of)


def _histograms(session: Session, fingerprints: Collection[str]) -> dict[str, Histogram]:
    query = select(WorkloadRow.fingerprint, DataProfileRow.histogram).where(WorkloadRow.fingerprint.in_(fingerprints))
    query = query.join(DataProfileRow, DataProfileRow.fingerprint == WorkloadRow.data_fingerprint)
    return {fingerprint: codec.histogram(buckets) for fingerprint, buckets in session.execute(query)}


def find(session: Session, id_prefix: str) -> BestPlan:
    prefix = id_prefix.lower()
    ids = select(BestPlanRow.plan_id).distinct().order_by(BestPlanRow.plan_id)
    beginning = ids.where(BestPlanRow.plan_id.startswith(prefix, autoescape=True))
    matches = session.scalars(beginning.limit(_SHOWN + 1)).all()
    if not matches:
        near = difflib.get_close_matches(prefix, session.scalars(ids).all(), n=3, cutoff=0.0)
        advice = f"near ids are {', '.join(near)}" if near else "no study has found a plan yet; run a search first"
        raise UnknownPlan(f"no plan begins with {id_prefix!r}; {advice}")
    if len(matches) > 1:
        more = ", ..." if len(matches) > _SHOWN else ""
        raise AmbiguousId(f"several plans begin with {id_prefix!r}: {', '.join(matches[:_SHOWN])}{more}; add digits")
    query = select(BestPlanRow).where(BestPlanRow.plan_id == matches[0])
    return _read(session, query.order_by(BundleRow.source.is_not(None), BestPlanRow.created.desc()).limit(1))[0]


def _read(session: Session, query: Select[Any]) -> tuple[BestPlan, ...]:
    sourced = provenance.with_source(query, BestPlanRow.study_id)
    return tuple(codec.best_plan(row, source) for row, source in session.execute(sourced))
