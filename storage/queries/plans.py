"""Winners of studies: stored, listed, and searched for the nearest to a workload."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from sqlalchemy import Select, exists, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session
from sqlalchemy.sql.elements import ColumnElement

from storage.database import rows
from storage.database.tables import BestPlanRow, DataProfileRow, HardwareRow, ModelRow, StudyRow, WorkloadRow
from storage.nearness import Difference, Fields, differences, distance
from storage.queries import codec, provenance, workloads
from storage.queries.codec import Histogram
from storage.records import BestPlan
from trials.workload import Hardware, ModelShape, Software

_HISTOGRAM = "data.histogram"
_COMPARED = 64
"""Number of workloads whose histograms are compared, unless the caller wants more."""
_Columns = dict[str, InstrumentedAttribute[Any]]
_HARDWARE_COLUMNS: _Columns = {
    "fingerprint": HardwareRow.fingerprint,
    **{f"hardware.{field.name}": getattr(HardwareRow, field.name) for field in fields(Hardware)},
}
_MODEL_COLUMNS: _Columns = {
    "fingerprint": ModelRow.fingerprint,
    **{f"model.{field.name}": getattr(ModelRow, field.name) for field in fields(ModelShape)},
}
_OWN_COLUMNS: _Columns = {
    **{name: getattr(WorkloadRow, name) for name in ("oversize", "global_batch_samples", "memory_limit_bytes")},
    **{f"software.{field.name}": getattr(WorkloadRow, field.name) for field in fields(Software)},
}
_OF_WORKLOAD = (
    WorkloadRow.fingerprint,
    WorkloadRow.hardware_fingerprint,
    WorkloadRow.model_fingerprint,
    DataProfileRow.samples,
    DataProfileRow.vision_units,
    DataProfileRow.text_tokens,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NearPlan:
    """A winner, and the distance of its workload from the given one."""

    best: BestPlan
    differences: tuple[Difference, ...]
    """The weightiest first."""
    distance: float
    """Their sum; 0 when nothing that counts differs."""


def save(session: Session, best: BestPlan) -> None:
    workloads.add(session, best.workload)
    rows.ensure(session, codec.plan_row(best.plan))
    session.add(codec.best_plan_row(best))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Conditions on the winners of a query; names match any part of the stored one, in any case."""

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
    row = session.scalars(query).one_or_none()
    return None if row is None else codec.best_plan(row, None)


def of_study(session: Session, study_id: str) -> BestPlan | None:
    query = select(BestPlanRow).where(BestPlanRow.study_id == study_id)
    found = session.execute(provenance.with_source(query, BestPlanRow.study_id)).one_or_none()
    return None if found is None else codec.best_plan(*found)


def nearest(session: Session, now: Fields, wanted: Wanted, limit: int) -> tuple[NearPlan, ...]:
    compared = _distances(session, now, wanted, limit)
    query = select(BestPlanRow).where(BestPlanRow.workload_fingerprint.in_(compared))
    best_plans = ((best, compared[best.workload.fingerprint]) for best in _read(session, query))
    found = [NearPlan(best=best, differences=each, distance=distance(each)) for best, each in best_plans]
    return tuple(sorted(found, key=lambda near: (near.distance, near.best.epoch_seconds))[:limit])


def _distances(session: Session, now: Fields, wanted: Wanted, limit: int) -> dict[str, tuple[Difference, ...]]:
    """Return the differences of the nearest workloads, by fingerprint.

    Histograms are long, so only those of the nearest workloads by all other fields and mean lengths are read.
    """
    coarse = {name: value for name, value in now.items() if name != _HISTOGRAM}
    ranked = _ranked(session, coarse, wanted, _mean_lengths(now))
    if _HISTOGRAM in now:
        near = ranked[: max(limit, _COMPARED)]
        histograms = _histograms(session, [each.fingerprint for each in near])
        of_data = {_HISTOGRAM: now[_HISTOGRAM]}
        whole = [(each, differences({_HISTOGRAM: histograms[each.fingerprint]}, of_data)) for each in near]
        ranked = sorted(
            _Ranked(each.distance + distance(data), each.lengths, each.fingerprint, each.found + data)
            for each, data in whole
        )
    return {each.fingerprint: tuple(sorted(each.found, key=lambda one: -one.distance)) for each in ranked[:limit]}


class _Ranked(NamedTuple):
    """A workload; tuples of them sort by distance."""

    distance: float
    lengths: float
    """Distance of its mean lengths, in doublings."""
    fingerprint: str
    found: tuple[Difference, ...]


def _ranked(session: Session, now: Fields, wanted: Wanted, lengths: tuple[float, ...]) -> list[_Ranked]:
    """Return all workloads with a winner, nearest first. Shared hardware and models are compared only once."""
    hardware = _compared(session, _HARDWARE_COLUMNS, now)
    models = _compared(session, _MODEL_COLUMNS, now)
    has_winner = exists().where(BestPlanRow.workload_fingerprint == WorkloadRow.fingerprint)
    query = (
        select(*_OF_WORKLOAD, *_OWN_COLUMNS.values())
        .join(HardwareRow, HardwareRow.fingerprint == WorkloadRow.hardware_fingerprint)
        .join(ModelRow, ModelRow.fingerprint == WorkloadRow.model_fingerprint)
        .join(DataProfileRow, DataProfileRow.fingerprint == WorkloadRow.data_fingerprint)
        .where(has_winner, *wanted.conditions())
    )
    ranked: list[_Ranked] = []
    for fingerprint, of_hardware, of_model, samples, units, tokens, *own in session.execute(query):
        found = differences(dict(zip(_OWN_COLUMNS, own, strict=True)), now)
        found = (*hardware[of_hardware], *models[of_model], *found)
        means = units / samples, tokens / samples
        apart = sum(abs(math.log2((1 + then) / (1 + mean))) for then, mean in zip(means, lengths, strict=False))
        ranked.append(_Ranked(distance(found), apart, fingerprint, found))
    return sorted(ranked, key=lambda each: each[:3])


def _mean_lengths(now: Fields) -> tuple[float, ...]:
    """Return the mean vision units and text tokens of a sample, as far as they are known."""
    samples = now.get("data.samples")
    known = [now.get("data.vision_units"), now.get("data.text_tokens")]
    return tuple(each / samples for each in known if isinstance(each, int) and isinstance(samples, int) and samples)


def _compared(session: Session, columns: _Columns, now: Fields) -> dict[str, tuple[Difference, ...]]:
    """Return the differences of all rows of a table by fingerprint, the first column."""
    names = tuple(columns)[1:]
    return {
        row[0]: differences(dict(zip(names, row[1:], strict=True)), now)
        for row in session.execute(select(*columns.values()))
    }


def _histograms(session: Session, fingerprints: Collection[str]) -> dict[str, Histogram]:
    query = select(WorkloadRow.fingerprint, DataProfileRow.histogram).where(WorkloadRow.fingerprint.in_(fingerprints))
    query = query.join(DataProfileRow, DataProfileRow.fingerprint == WorkloadRow.data_fingerprint)
    return {fingerprint: codec.histogram(buckets) for fingerprint, buckets in session.execute(query)}


def _read(session: Session, query: Select[Any]) -> tuple[BestPlan, ...]:
    """Return the readable ones; `rows.readable` logs the others."""
    sourced = provenance.with_source(query, BestPlanRow.study_id)
    sources = dict(map(tuple, session.execute(sourced)))
    return tuple(rows.readable(sources, lambda row: codec.best_plan(row, sources[row])))
