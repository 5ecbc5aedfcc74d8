"""The sections of a report: what is known becomes a chart, what is not is said in words."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.report.charts import causes, gantt, history, layers, memory, packs, plans, ranks
from autotune.report.charts.chart import Chart, Table
from autotune.report.environment import environment
from autotune.report.importance import importances, measured_points
from autotune.report.reproduction import CopyableText, reproduction
from autotune.report.sides import ComparedPlan
from autotune.report.simulation import PackedEpoch, Simulated
from autotune.report.source import StudySource


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """A part of the page under a heading."""

    id: str
    title: str
    charts: tuple[Chart, ...] = ()
    notes: tuple[str, ...] = ()
    """What could not be shown, and why."""
    remarks: tuple[str, ...] = ()
    """What there is to say where nothing is missing."""
    tables: tuple[Table, ...] = ()
    listings: tuple[CopyableText, ...] = ()


def sections(source: StudySource, sides: Sequence[ComparedPlan], database: str | None) -> tuple[PageSection, ...]:
    """Return all sections in order."""
    return (
        _step(sides),
        _memory(source, sides),
        _layers(source),
        _packs(sides),
        _search(source),
        _plans(source),
        PageSection(id="environment", title="Environment", tables=tuple(environment(source))),
        PageSection(id="reproduce", title="Reproduce", listings=tuple(reproduction(source, database))),
    )


def _step(sides: Sequence[ComparedPlan]) -> PageSection:
    simulated = [(side, side.simulated) for side in sides if isinstance(side.simulated, Simulated)]
    longest = max((found.timeline.seconds for _, found in simulated), default=0.0)
    measured = [side for side in sides if side.measurement is not None]
    known = [side for side in sides if causes.is_known(side)]

    def charts() -> Iterator[Chart]:
        if known:
            yield causes.causes(known)
        for side, found in simulated:
            if found.timeline.seconds > 0:
                yield gantt.gantt(side, longest)
        if measured:
            yield ranks.ranks(measured)

    return PageSection(
        id="step", title="Time: one step", charts=tuple(charts()), notes=(*_unsimulated(sides), *_unmeasured(sides))
    )


def _unsimulated(sides: Sequence[ComparedPlan]) -> Iterator[str]:
    for side in sides:
        if isinstance(side.simulated, str):
            yield f"{side.title} ({side.plan.id}) is not simulated: {side.simulated}."


def _unmeasured(sides: Sequence[ComparedPlan]) -> Iterator[str]:
    if not sides:
        yield "No plan was tried yet."
    for side in sides:
        if side.measurement is None:
            yield f"{side.title} ({side.plan.id}) has no complete measurement in this study."


def _memory(source: StudySource, sides: Sequence[ComparedPlan]) -> PageSection:
    limit = source.workload.memory_limit_bytes
    known = [side for side in sides if side.peak_bytes or isinstance(side.simulated, Simulated)]
    most = max((memory.most_bytes(side, limit) for side in known), default=0.0)
    charts = tuple(memory.memory(side, limit, most) for side in known)
    notes = () if charts else ("The memory of no plan is known.",)
    return PageSection(id="memory", title="Memory", charts=charts, notes=(*notes, *_unsimulated(sides)))


def _layers(source: StudySource) -> PageSection:
    if isinstance(source.profile, str):
        return PageSection(id="layers", title="Layers", notes=(f"{source.profile[0].upper()}{source.profile[1:]}.",))
    return PageSection(id="layers", title="Layers", charts=(layers.layers(source.profile, source.workload),))


def _packs(sides: Sequence[ComparedPlan]) -> PageSection:
    packed = [side for side in sides if isinstance(side.packs, PackedEpoch)]
    notes = tuple(f"{side.title}: {side.packs}." for side in sides if isinstance(side.packs, str))
    charts = (packs.packs(packed), packs.waste(packed)) if packed else ()
    return PageSection(
        id="packs",
        title="Packs and balance",
        charts=charts,
        notes=notes or (() if charts else ("No plan was tried yet.",)),
    )


def _search(source: StudySource) -> PageSection:
    charts: list[Chart] = [history.history(source)] if source.finished else []
    notes, remarks = [] if charts else ["No trial of this study has finished."], list[str]()
    shares = importances(source.finished)
    if shares:
        charts.append(plans.importance(shares, len(measured_points(source.finished))))
    else:
        notes.append("Too few measured plans of the search space to say which settings mattered.")
    if plans.has_failures(source.trials):
        charts.append(plans.failures(source.trials))
    elif source.trials:
        remarks.append("Every trial was measured to its end: there are no failures to show.")
    return PageSection(
        id="search", title="The search", charts=tuple(charts), notes=tuple(notes), remarks=tuple(remarks)
    )


def _plans(source: StudySource) -> PageSection:
    if not plans.measured_plans(source):
        return PageSection(id="plans", title="Plans", notes=("No plan was measured to its end.",))
    return PageSection(id="plans", title="Plans", charts=(plans.pareto(source),))
