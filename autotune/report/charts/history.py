"""Chart of the trials of a search in their order."""

from collections.abc import Sequence
from itertools import accumulate

from autotune.plan_text import outcome_text, plan_text
from autotune.report.charts.chart import (
    INK,
    MUTED,
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
from autotune.report.charts.quantities import seconds_text, with_error
from autotune.report.source import StudySource, is_whole
from autotune.search.roles import BASELINES, REPEATS, Role
from storage.records import FinishedTrial, TrialRecord
from trials.outcome import Completed
from trials.units import number_of

_KINDS = {
    "baseline": "var(--orange)",
    "given in the queue": "var(--pink)",
    "predicted": "var(--purple)",
    "proposed by the sampler": "var(--blue)",
    "repeat": "var(--green)",
    "no result": "var(--red)",
}
_NAME = 0.08
"""Height of a baseline's name, as a share of the seconds that are drawn; the axis may be longer."""
_TOOLTIP = tooltip(("trial", "trial", "d"), ("role", "role"), ("plan", "plan"), ("outcome", "outcome"))


def history(source: StudySource) -> Chart:
    """Chart the epoch seconds of all trials, with the best so far and the baselines."""
    trials = source.finished
    samples = source.workload.data.samples
    rows = [_row(trial, samples) for trial in trials]
    timed = source.timed
    bests = accumulate((trial.result.epoch_seconds or 0.0 for trial in timed), min)
    steps = [{"trial": trial.number, "best": round(best, 4)} for trial, best in zip(timed, bests, strict=True)]
    if steps:
        # The line goes on to the last trial, also where that gave no result.
        steps.append({"trial": trials[-1].number, "best": steps[-1]["best"]})
    fastest = min((trial.result.epoch_seconds or 0.0 for trial in timed), default=None)
    disturbed = sum(trial.result.is_disturbed for trial in timed)
    return Chart(
        id="history",
        title="The search, trial by trial",
        text=(
            "Seconds that an epoch would take with the plan of each trial; the line is the best so far, bars are one "
            f"standard error. Hollow points were disturbed by other load ({disturbed} of {len(timed)}). Crosses at the "
            "bottom gave no result, and triangles were ended early as clearly slower. Select a point to see all runs "
            "of its plan."
        ),
        summary=(
            f"{number_of(len(trials), 'finished trial')}, {len(timed)} of them measured to the end"
            + ("" if fastest is None else f", the fastest with {seconds_text(fastest)} an epoch")
        ),
        basis="measured",
        spec=_spec(rows, steps, _baselines(source)),
        legend=(*boxes(_KINDS), ("best so far", INK, "line")),
        table=Table(
            header=("trial", "role", "plan", "outcome", "epoch seconds", "disturbed by", "settings"),
            rows=tuple(_line(trial, samples) for trial in source.trials),
        ),
    )


def _kind(trial: FinishedTrial) -> str:
    if not isinstance(trial.result.outcome, Completed):
        return "no result"
    if trial.role in BASELINES:
        return "baseline"
    if trial.role in REPEATS:
        return "repeat"
    if trial.role == Role.QUEUED:
        return "given in the queue"
    return "predicted" if trial.role in (Role.PREDICTED, Role.INHERITED) else "proposed by the sampler"


def _row(trial: FinishedTrial, samples: int) -> Row:
    result = trial.result
    row = {
        "trial": trial.number,
        "plan": trial.plan.id,
        "role": trial.role,
        "kind": _kind(trial),
        "outcome": outcome_text(result.outcome, result.epoch_seconds, samples),
    }
    if result.epoch_seconds is not None:
        error = result.epoch_seconds_error or 0.0
        row |= {
            "seconds": round(result.epoch_seconds, 4),
            "low": round(result.epoch_seconds - error, 4),
            "high": round(result.epoch_seconds + error, 4),
            "how": "ended early" if not is_whole(trial) else "disturbed" if result.is_disturbed else "trusted",
        }
    return row


def _baselines(source: StudySource) -> list[Row]:
    """Return the seconds of each kind of baseline's fastest run; for runs of an earlier study, the stated seconds."""
    found: dict[str, float] = {}
    for trial in source.timed:
        if trial.role in BASELINES:
            seconds = trial.result.epoch_seconds or 0.0
            found[trial.role] = min(seconds, found.get(trial.role, seconds))
    for stated in () if source.winner is None else source.winner.baselines:
        found.setdefault(stated.role, source.workload.data.samples / stated.estimated_samples_per_second)
    return [{"baseline": role, "seconds": round(seconds, 4)} for role, seconds in found.items()]


def _spec(rows: Sequence[Row], steps: Sequence[Row], baselines: Sequence[Row]) -> Spec:
    most = max((row["trial"] for row in rows), default=0)
    x = number("trial", "trial", axis=count_axis(most), scale={"padding": 12, "nice": False})
    y = number("seconds", "seconds of an epoch", scale={"zero": False, "nice": True})
    best: Spec = {
        "data": {"values": list(steps)},
        "mark": {"type": "line", "interpolate": "step-after", "color": INK, "strokeWidth": 1.5},
        "encoding": {"x": x, "y": {**y, "field": "best"}},
    }
    # A layer without data would have no extent.
    has_seconds, has_failures = ("seconds" in row for row in rows), ("seconds" not in row for row in rows)
    layers = [
        *(_usual(baselines, _names(baselines, rows), y) if baselines else ()),
        *([best] if steps else []),
        *(_timed(x, y) if any(has_seconds) else ()),
        *([_failed(x)] if any(has_failures) else []),
    ]
    return spec(rows, height=320 if steps else 60, layer=layers)


def _names(baselines: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Return the labels of the lines of the baselines; lines that are close together share one."""
    drawn = [row[key] for row in rows for key in ("low", "high") if key in row]
    drawn += [row["seconds"] for row in baselines]
    height = _NAME * (max(drawn) - min(drawn))
    names: list[Row] = []
    for row in sorted(baselines, key=lambda row: -row["seconds"]):
        if names and names[-1]["seconds"] - row["seconds"] < height:
            names[-1] = {**names[-1], "baseline": f"{names[-1]['baseline']}, {row['baseline']}"}
        else:
            names.append(row)
    return names


def _usual(baselines: Sequence[Row], names: Sequence[Row], y: Spec) -> tuple[Spec, Spec]:
    """Return the lines of the baselines, and their names."""
    lines, texts = ({"values": list(each)} for each in (baselines, names))
    text = {"type": "text", "align": "right", "baseline": "bottom", "dy": -3, "color": MUTED, "fontSize": 11}
    return (
        {"data": lines, "mark": {"type": "rule", "color": MUTED, "strokeDash": [4, 4]}, "encoding": {"y": y}},
        {"data": texts, "mark": text, "encoding": {"x": {"value": "width"}, "y": y, "text": category("baseline")}},
    )


def _timed(x: Spec, y: Spec) -> tuple[Spec, Spec]:
    """Return the error bars and the points of trials with seconds."""
    timed = [{"filter": "isValid(datum.seconds)"}]
    kind = coloured("kind", _KINDS)
    faded: Spec = {"condition": {"param": "plan-of", "value": 1}, "value": 0.15}
    shape = {"condition": {"test": "datum.how == 'ended early'", "value": "triangle-down"}, "value": "circle"}
    errors: Spec = {
        "transform": timed,
        "mark": {"type": "rule", "strokeWidth": 1.5},
        "encoding": {"x": x, "y": {**y, "field": "low"}, "y2": {"field": "high"}, "color": kind, "opacity": faded},
    }
    points: Spec = {
        "transform": timed,
        "params": [{"name": "plan-of", "select": {"type": "point", "fields": ["plan"]}}],
        "mark": {"type": "point", "size": 60, "filled": False, "strokeWidth": 2, "cursor": "pointer"},
        "encoding": {
            "x": x,
            "y": y,
            "stroke": kind,
            "fill": {**kind, "condition": {"test": "datum.how == 'disturbed'", "value": PAPER}},
            "shape": shape,
            "opacity": faded,
            "tooltip": _TOOLTIP,
        },
    }
    return errors, points


def _failed(x: Spec) -> Spec:
    """Return the crosses of trials without seconds, at the bottom."""
    return {
        "transform": [{"filter": "!isValid(datum.seconds)"}],
        "mark": {"type": "point", "shape": "cross", "size": 110, "angle": 45, "filled": True},
        "encoding": {
            "x": x,
            "y": {"value": {"expr": "height - 6"}},
            "color": coloured("kind", _KINDS),
            "tooltip": _TOOLTIP,
        },
    }


def _line(trial: TrialRecord, samples: int) -> tuple[str, ...]:
    if not isinstance(trial, FinishedTrial):
        return (
            str(trial.number),
            trial.role,
            trial.plan.id,
            "no result yet, or its process died",
            "",
            "",
            plan_text(trial.plan),
        )
    result = trial.result
    seconds = (
        "" if result.epoch_seconds is None else with_error(result.epoch_seconds, result.epoch_seconds_error or 0.0)
    )
    outcome = outcome_text(result.outcome, result.epoch_seconds, samples)
    return (
        str(trial.number),
        trial.role,
        trial.plan.id,
        outcome,
        seconds,
        result.disturbance or "",
        plan_text(trial.plan),
    )
