"""Charts of the plans of a search: speed against memory, what mattered, and why plans failed."""

from collections import Counter
from collections.abc import Mapping, Sequence

from autotune.plan_text import plan_text
from autotune.report.charts.chart import (
    LIMIT,
    PAPER,
    Chart,
    Row,
    Spec,
    Table,
    boxes,
    category,
    coloured,
    count_axis,
    number,
    spec,
    tooltip,
)
from autotune.report.charts.quantities import Memory, percent_text
from autotune.report.source import StudySource
from storage.records import AbandonedTrial, FinishedTrial, ParetoPlan, TrialRecord
from trials.outcome import Completed, Failed, Rejected

_CAUSES = {
    "out-of-memory": "ran out of memory",
    "rejected": "cannot fit, so it never ran",
    "crash": "crashed",
    "timeout": "took too long",
    "ended early": "ended early as clearly slower",
    "given up": "its process died",
    "unfinished": "no result yet",
}


# A choice: bars of further parameters are too short to compare; the table below the chart has all.
_MOST_PARAMETERS = 15
_NEAR = 2
"""Limits above this many times the largest peak are not drawn: the plans would be too close together."""
_IN_FRONT, _OTHER = "in the Pareto set", "other plan"
_KINDS = {_IN_FRONT: "var(--blue)", _OTHER: "var(--grey)"}


def pareto(source: StudySource) -> Chart:
    """Chart the speed and the peak memory of the measured plans, of which there is one, and their Pareto set."""
    points = measured_plans(source)
    # A search with several objectives stored its Pareto set, by energy too; else speed and memory decide.
    front = _stored(source) or [one for one in points if not any(_beats(each, one) for each in points)]
    memory_limit_bytes, peaks = source.workload.memory_limit_bytes, [one.peak_bytes for one in points]
    unit, is_near = Memory(memory_limit_bytes), memory_limit_bytes <= _NEAR * max(peaks)
    rows: list[Row] = [
        {
            "plan": one.plan.id,
            "speed": round(one.estimated_samples_per_second, 4),
            "memory": unit.of(one.peak_bytes),
            "kind": _IN_FRONT if one in front else _OTHER,
            "settings": plan_text(one.plan),
        }
        for one in points
    ]
    lines = tuple(
        (
            one.plan.id,
            f"{one.estimated_samples_per_second:.2f}",
            unit.text(one.peak_bytes),
            "-" if one.joules_per_sample is None else f"{one.joules_per_sample:.3g}",
            plan_text(one.plan),
        )
        for one in sorted(front, key=lambda one: -one.estimated_samples_per_second)
    )
    return Chart(
        id="pareto",
        title="Speed against memory: the Pareto set",
        text=(
            "Each point is a plan. Of those in the Pareto set, none is beaten by another plan in all objectives. The "
            f"limit of {unit.text(memory_limit_bytes)} per rank is {'the line' if is_near else 'far to the right'}. "
            "Speeds are corrected for drift of the machine where the result states them; those of other plans are "
            "means of their own runs."
        ),
        summary=f"{len(front)} of {len(points)} measured plans are in the Pareto set",
        basis="measured",
        spec=_pareto_spec(rows, unit.of(memory_limit_bytes) if is_near else None, unit.unit),
        legend=(*boxes(_KINDS), *((("limit", LIMIT, "line"),) if is_near else ())),
        table=Table(header=("plan", "samples/s", "peak memory", "J/sample", "settings"), rows=lines),
    )


def measured_plans(source: StudySource) -> list[ParetoPlan]:
    """Return the measured plans, those of the stored Pareto set as it has them: an earlier study may have run them."""
    stored = {each.plan: each for each in _stored(source)}
    own = {
        plan: ParetoPlan(
            plan=plan,
            estimated_samples_per_second=speed.mean,
            peak_bytes=max(source.peak_bytes(plan).values()),
            joules_per_sample=None,
        )
        for plan in source.runs_by_plan
        if plan not in stored and (speed := source.speed(plan))
    }
    return [*stored.values(), *own.values()]


def _stored(source: StudySource) -> Sequence[ParetoPlan]:
    return () if source.winner is None else source.winner.pareto


def _beats(one: ParetoPlan, other: ParetoPlan) -> bool:
    """Return whether a plan is no worse in speed and memory than the other, and better in one of them."""
    mine, theirs = ((-each.estimated_samples_per_second, each.peak_bytes) for each in (one, other))
    return mine[0] <= theirs[0] and mine[1] <= theirs[1] and mine != theirs


def _pareto_spec(rows: Sequence[Row], limit: float | None, unit: str) -> Spec:
    peaks = [row["memory"] for row in rows]
    domain = [0.95 * min(peaks), 1.02 * max(*peaks, limit or 0.0, 0.0)]
    x = number("memory", f"peak memory of the fullest rank, {unit}", scale={"domain": domain, "zero": False})
    y = number("speed", "samples/s", scale={"zero": False, "padding": 12})
    front: Spec = {
        "transform": [{"filter": f"datum.kind == '{_IN_FRONT}'"}],
        "mark": {"type": "line", "color": "var(--blue)", "strokeWidth": 1, "opacity": 0.6},
        "encoding": {"x": x, "y": y, "order": {"field": "memory", "type": "quantitative"}},
    }
    points: Spec = {
        "mark": {"type": "circle", "size": 80, "opacity": 0.85, "stroke": PAPER},
        "encoding": {
            "x": x,
            "y": y,
            "color": coloured("kind", _KINDS),
            "tooltip": tooltip(
                ("plan", "plan"), ("speed", "samples/s", ".4~g"), ("memory", unit, ",.4~g"), ("settings", "settings")
            ),
        },
    }
    rule: Spec = {
        "mark": {"type": "rule", "color": LIMIT, "strokeWidth": 2, "strokeDash": [5, 3]},
        "encoding": {"x": {"datum": limit}},
    }
    return spec(rows, height=300, layer=[*([] if limit is None else [rule]), front, points])


def importance(shares: Mapping[str, float], trials: int) -> Chart:
    """Chart the importances of the parameters of the search."""
    lines = tuple((name.replace("_", " "), percent_text(share)) for name, share in shares.items())
    largest = list(zip(lines, shares.values(), strict=True))[:_MOST_PARAMETERS]
    rows = [{"parameter": name, "percent": round(100 * share, 3)} for (name, _), share in largest]
    cut = f" The {_MOST_PARAMETERS} largest are drawn." if len(lines) > _MOST_PARAMETERS else ""
    return Chart(
        id="importance",
        title="Which settings mattered",
        text=(
            f"Importances of the parameters of the search for the time of an epoch, from {trials} trials (Optuna's "
            f"PED-ANOVA). Few trials give rough values.{cut}"
        ),
        summary="; ".join(f"{name} {share}" for (name, share), _ in largest),
        basis="measured",
        spec=spec(
            rows,
            height=22 * len(rows),
            mark={"type": "bar", "color": "var(--blue)"},
            encoding={
                "y": category("parameter"),
                "x": number("percent", "importance, per cent"),
                "tooltip": tooltip(("parameter", "parameter"), ("percent", "per cent", ".3~g")),
            },
        ),
        table=Table(header=("parameter", "importance"), rows=lines),
    )


def failures(trials: Sequence[TrialRecord]) -> Chart:
    """Chart the trials without a whole measurement by cause; there has to be one."""
    found = [(trial, *cause) for trial in trials if (cause := _cause(trial))]
    counts = Counter(kind for _, kind, _ in found)
    rows = [{"cause": kind, "what": _CAUSES[kind], "trials": counts[kind]} for kind in _CAUSES if counts[kind]]
    return Chart(
        id="failures",
        title="Trials without a whole result, by cause",
        text=(f"{len(found)} of {len(trials)} trials. Those that ran out of memory teach the search which plans fit."),
        summary="; ".join(f"{row['cause']}: {row['trials']}" for row in rows),
        basis="measured",
        spec=spec(
            rows,
            height=28 * len(rows),
            mark={"type": "bar", "color": "var(--red)"},
            encoding={
                "y": category("cause"),
                "x": number("trials", "trials", axis=count_axis(max(counts.values()))),
                "tooltip": tooltip(("cause", "cause"), ("what", "meaning"), ("trials", "trials", "d")),
            },
        ),
        table=Table(
            header=("trial", "role", "plan", "cause", "detail"),
            rows=tuple((str(trial.number), trial.role, trial.plan.id, kind, detail) for trial, kind, detail in found),
        ),
    )


def has_failures(trials: Sequence[TrialRecord]) -> bool:
    return any(_cause(trial) for trial in trials)


def _cause(trial: TrialRecord) -> tuple[str, str] | None:
    """Return (kind, detail) of a trial that was not measured to the end."""
    if not isinstance(trial, FinishedTrial):
        return ("given up", "") if isinstance(trial, AbandonedTrial) else ("unfinished", "")
    match trial.result.outcome:
        case Completed(shortened=True):
            return "ended early", ""
        case Rejected(reason=reason):
            return "rejected", reason
        case Failed(cause=cause):
            return cause.kind, str(cause)
        case _:
            return None
