"""Winners of studies: stored, listed, and searched for the nearest to a workload."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from sqlalchemy import Column, ColumnElement, Connection, Select, exists, func, insert, select

from storage.database import rows
from storage.database.tables import BEST_PLAN, DATA_PROFILE, HARDWARE, MODEL, PLAN, STUDY, WORKLOAD
from storage.nearness import Difference, Fields, differences, distance
from storage.queries import annotations, codec, provenance, studies, workloads
from storage.queries.codec import Histogram
from storage.records import BestPlan
from trials.workload import Hardware, ModelShape, Software

_HISTOGRAM = "data.histogram"
# A choice: enough for most queries, and histograms of a few MB.
_COMPARED = 64
"""Number of workloads whose histograms are read and compared at once."""
_Columns = dict[str, Column[Any]]
_HARDWARE_COLUMNS: _Columns = {
    "fingerprint": HARDWARE.c.fingerprint,
    **{f"hardware.{field.name}": HARDWARE.c[field.name] for field in fields(Hardware)},
}
_MODEL_COLUMNS: _Columns = {
    "fingerprint": MODEL.c.fingerprint,
    **{f"model.{field.name}": MODEL.c[field.name] for field in fields(ModelShape)},
}
_OWN_COLUMNS: _Columns = {
    **{name: WORKLOAD.c[name] for name in ("oversize", "global_batch_samples", "memory_limit_bytes")},
    **{f"software.{field.name}": WORKLOAD.c[field.name] for field in fields(Software)},
}
_OF_WORKLOAD = (
    WORKLOAD.c.fingerprint,
    WORKLOAD.c.hardware_fingerprint,
    WORKLOAD.c.model_fingerprint,
    DATA_PROFILE.c.samples,
    DATA_PROFILE.c.vision_units,
    DATA_PROFILE.c.text_tokens,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NearPlan:
    """A winner, and the distance of its workload from the given one."""

    best: BestPlan
    differences: tuple[Difference, ...]
    """The weightiest first."""
    distance: float
    """Their sum; 0 when nothing that counts differs."""


def save(connection: Connection, best: BestPlan) -> None:
    workloads.add(connection, best.workload)
    rows.ensure(connection, PLAN, codec.plan_row(best.plan))
    connection.execute(insert(BEST_PLAN).values(codec.best_plan_row(best)))


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedPlans:
    """Conditions on the winners of a query; names match any part of the stored one, in any case."""

    hardware_fingerprint: str | None = None
    hardware_name: str | None = None
    model_name: str | None = None
    workload_fingerprint: str | None = None
    tag: str | None = None
    """A tag of the plan."""
    archived: bool = False
    """Whether winners of archived studies count."""

    def of_workload(self) -> Iterator[ColumnElement[bool]]:
        if self.hardware_fingerprint is not None:
            yield WORKLOAD.c.hardware_fingerprint == self.hardware_fingerprint
        if self.hardware_name is not None:
            yield HARDWARE.c.device_name.icontains(self.hardware_name, autoescape=True)
        if self.workload_fingerprint is not None:
            yield WORKLOAD.c.fingerprint == self.workload_fingerprint

    def of_winner(self) -> Iterator[ColumnElement[bool]]:
        if self.tag is not None:
            yield annotations.has_tag(PLAN, BEST_PLAN.c.plan_id, self.tag)
        if self.model_name is not None:
            yield BEST_PLAN.c.study_id.in_(select(STUDY.c.id).where(studies.is_of_model(self.model_name)))
        if not self.archived:
            yield BEST_PLAN.c.study_id.not_in(select(STUDY.c.id).where(STUDY.c.archived.is_not(None)))


def listed(connection: Connection, wanted: WantedPlans, limit: int | None) -> tuple[BestPlan, ...]:
    # Keeps the plans of a workload together, in the place of its newest study.
    newest = func.max(STUDY.c.started).over(partition_by=BEST_PLAN.c.workload_fingerprint)
    query = (
        _winners()
        .where(*wanted.of_workload(), *wanted.of_winner())
        .order_by(newest.desc(), BEST_PLAN.c.workload_fingerprint, BEST_PLAN.c.epoch_seconds)
        .limit(limit)
    )
    return _read(connection, query)


def count(connection: Connection) -> int:
    """Return the number of all winners, without reading them."""
    return connection.scalars(select(func.count()).select_from(BEST_PLAN)).one()


def last(connection: Connection, workload_fingerprint: str, trainer: str | None = None) -> BestPlan | None:
    """Return the winner of the newest study on exactly this workload, without imported ones, or None.

    Studies for this trainer, by default for none, come before all others.
    """
    query = (
        select(STUDY.c.id, STUDY.c.settings)
        .join(BEST_PLAN, BEST_PLAN.c.study_id == STUDY.c.id)
        .where(STUDY.c.workload_fingerprint == workload_fingerprint)
        .where(~provenance.is_foreign(STUDY.c.id), STUDY.c.archived.is_(None))
        .order_by(STUDY.c.started.desc())
    )
    found = connection.execute(query).all()
    wanted = [study for study, settings in found if settings.get("trainer") == trainer]
    return of_study(connection, (wanted or [study for study, _ in found])[0]) if found else None


def of_study(connection: Connection, study_id: str) -> BestPlan | None:
    """Return the winner of the study, or None while there is none."""
    query = _winners().where(BEST_PLAN.c.study_id == study_id)
    row = connection.execute(provenance.with_source(query, BEST_PLAN.c.study_id)).mappings().one_or_none()
    return None if row is None else codec.best_plan(row)


def nearest(connection: Connection, now: Fields, wanted: WantedPlans, limit: int) -> tuple[NearPlan, ...]:
    compared = _distances(connection, now, wanted, limit)
    query = _winners().where(BEST_PLAN.c.workload_fingerprint.in_(compared), *wanted.of_winner())
    best_plans = ((best, compared[best.workload.fingerprint]) for best in _read(connection, query))
    found = [NearPlan(best=best, differences=each, distance=distance(each)) for best, each in best_plans]
    return tuple(sorted(found, key=lambda near: (near.distance, near.best.epoch_seconds))[:limit])


def _distances(
    connection: Connection, now: Fields, wanted: WantedPlans, limit: int
) -> dict[str, tuple[Difference, ...]]:
    """Return the differences of the nearest workloads, by fingerprint.

    Histograms are long, so they are read of workloads alone that are near enough by all other fields.
    """
    coarse = {name: value for name, value in now.items() if name != _HISTOGRAM}
    ranked = _ranked(connection, coarse, wanted, _mean_lengths(now))
    if _HISTOGRAM in now:
        ranked = _nearest_of_data(connection, ranked, {_HISTOGRAM: now[_HISTOGRAM]}, limit)
    return {each.fingerprint: tuple(sorted(each.found, key=lambda one: -one.distance)) for each in ranked[:limit]}


def _nearest_of_data(connection: Connection, ranked: "Sequence[_Ranked]", now: Fields, limit: int) -> "list[_Ranked]":
    """Add the distances of histograms; only the first `limit` of the returned workloads are surely the nearest."""
    whole: list[_Ranked] = []
    for first in range(0, len(ranked), _COMPARED):
        # No workload is nearer with its histogram than without.
        if len(whole) >= limit and ranked[first].distance >= whole[limit - 1].distance:
            break
        some = ranked[first : first + _COMPARED]
        histograms = _histograms(connection, [each.fingerprint for each in some])
        for each in some:
            data = differences({_HISTOGRAM: histograms[each.fingerprint]}, now)
            whole.append(_Ranked(each.distance + distance(data), each.lengths, each.fingerprint, each.found + data))
        whole.sort()
    return whole


class _Ranked(NamedTuple):
    """A workload; tuples of them sort by distance."""

    distance: float
    lengths: float
    """Distance of its mean lengths, in doublings."""
    fingerprint: str
    found: tuple[Difference, ...]


def _ranked(connection: Connection, now: Fields, wanted: WantedPlans, lengths: tuple[float, ...]) -> list[_Ranked]:
    """Return all workloads with a winner, nearest first. Shared hardware and models are compared only once."""
    hardware = _compared(connection, _HARDWARE_COLUMNS, now)
    models = _compared(connection, _MODEL_COLUMNS, now)
    has_winner = exists().where(BEST_PLAN.c.workload_fingerprint == WORKLOAD.c.fingerprint, *wanted.of_winner())
    query = (
        select(*_OF_WORKLOAD, *_OWN_COLUMNS.values())
        .join(HARDWARE, HARDWARE.c.fingerprint == WORKLOAD.c.hardware_fingerprint)
        .join(MODEL, MODEL.c.fingerprint == WORKLOAD.c.model_fingerprint)
        .join(DATA_PROFILE, DATA_PROFILE.c.fingerprint == WORKLOAD.c.data_fingerprint)
        .where(has_winner, *wanted.of_workload())
    )
    ranked: list[_Ranked] = []
    for fingerprint, of_hardware, of_model, samples, units, tokens, *own in connection.execute(query):
        found = differences(dict(zip(_OWN_COLUMNS, own, strict=True)), now)
        found = (*hardware[of_hardware], *models[of_model], *found)
        means = units / samples, tokens / samples
        # No lengths are given without a job; then no workload is farther than another.
        apart = sum(abs(math.log2((1 + then) / (1 + mean))) for then, mean in zip(means, lengths, strict=False))
        ranked.append(_Ranked(distance(found), apart, fingerprint, found))
    return sorted(ranked, key=lambda each: each[:3])


def _mean_lengths(now: Fields) -> tuple[float, ...]:
    """Return the mean vision units and text tokens of a sample, as far as they are known."""
    samples = now.get("data.samples")
    known = [now.get("data.vision_units"), now.get("data.text_tokens")]
    return tuple(each / samples for each in known if isinstance(each, int) and isinstance(samples, int) and samples)


def _compared(connection: Connection, columns: _Columns, now: Fields) -> dict[str, tuple[Difference, ...]]:
    """Return the differences of all rows of a table by fingerprint, the first column."""
    names = tuple(columns)[1:]
    return {
        row[0]: differences(dict(zip(names, row[1:], strict=True)), now)
        for row in connection.execute(select(*columns.values()))
    }


def _histograms(connection: Connection, fingerprints: Collection[str]) -> dict[str, Histogram]:
    query = select(WORKLOAD.c.fingerprint, DATA_PROFILE.c.histogram).where(WORKLOAD.c.fingerprint.in_(fingerprints))
    query = query.join(DATA_PROFILE, DATA_PROFILE.c.fingerprint == WORKLOAD.c.data_fingerprint)
    return {fingerprint: codec.histogram(buckets) for fingerprint, buckets in connection.execute(query)}


def _winners() -> Select[Any]:
    """Select the winners with the names and settings of their studies."""
    of_study = STUDY.c.name, STUDY.c.settings
    return rows.whole(BEST_PLAN).join(STUDY, STUDY.c.id == BEST_PLAN.c.study_id).add_columns(*of_study)


def _read(connection: Connection, query: Select[Any]) -> tuple[BestPlan, ...]:
    """Return the readable plans; `rows.readable` logs rows that cannot be read."""
    found = connection.execute(provenance.with_source(query, BEST_PLAN.c.study_id)).mappings()
    return tuple(rows.readable(BEST_PLAN, found, codec.best_plan))
