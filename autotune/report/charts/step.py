"""Charts of one optimizer step: its simulated passes, the measured time of its ranks, and the causes of its time."""

from collections.abc import Sequence

from autotune.report.charts.chart import (
    COLOURS,
    PAPER,
    Chart,
    Row,
    Spec,
    Table,
    boxes,
    category,
    coloured,
    number,
    spec,
    tooltip,
)
from autotune.report.charts.quantities import seconds_text, share_text
from autotune.report.sides import Side
from autotune.report.simulation import Simulated
from autotune.time_parts import MEANINGS

_TIME = "seconds from the beginning of the step"
_MOST_PASSES = 3000
"""Passes of a chart; a browser draws more of them too slowly."""
_CROWDED = 600
"""Passes between which no gaps are drawn, which would hide narrow ones."""
_NUMBERED = 0.014
"""Passes of at least this share of the step for each digit carry the number of their micro-batch."""
_DIGIT_PIXELS = 8
_MOST_RANKS = 24
"""Ranks that get a row each; of more, the means of each stage are shown."""
_CAUSES = {
    "ideal": "var(--green)",
    "padding": "var(--brown)",
    "recompute": "var(--purple)",
    "loading": "var(--yellow)",
    "stage_imbalance": "var(--orange)",
    "data_imbalance": "var(--red)",
    "bubble": "var(--pink)",
    "communication": "var(--blue)",
    "optimizer": "var(--grey)",
}
_PASSES = {"forward": COLOURS["forward"], "backward": COLOURS["backward"], "update": COLOURS["update"]}
_SPENT = {
    "loading": ("load_seconds", COLOURS["loading"]),
    "forward": ("forward_seconds", COLOURS["forward"]),
    "backward": ("backward_seconds", COLOURS["backward"]),
    "update": ("optimizer_seconds", COLOURS["update"]),
    "waiting": ("idle_seconds", COLOURS["waiting"]),
}


def causes(found: Sequence[Side]) -> Chart:
    """Chart the predicted seconds of an epoch by cause, a row for each plan. All sides are simulated."""
    rows: list[Row] = []
    lines: list[tuple[str, ...]] = []
    for side in found:
        assert isinstance(side.simulated, Simulated)
        totals = {
            name: seconds * side.simulated.epoch_factor
            for name, seconds in side.simulated.prediction.breakdown.totals.items()
        }
        whole = sum(totals.values()) or 1.0
        for order, (name, seconds) in enumerate(totals.items()):
            part = name.replace("_", " ")
            shown = {"seconds": round(seconds, 4), "share": round(seconds / whole, 4), "order": order}
            rows.append({"plan": side.key, "part": part, "what": MEANINGS[name], **shown})
            lines.append((side.key, part, seconds_text(seconds), share_text(seconds / whole), MEANINGS[name]))
    colours = {name.replace("_", " "): colour for name, colour in _CAUSES.items()}
    return Chart(
        id="causes",
        title="Where the time of an epoch goes",
        text=(
            "Only the green part is the work that the samples need. Everything else is waste, of which a plan can save "
            "some: padding, layers that are computed again, and ranks that wait for each other. " + _compared(found)
        ),
        summary="; ".join(f"{plan}: {part} {seconds} ({share})" for plan, part, seconds, share, _ in lines),
        basis="predicted",
        spec=spec(
            rows,
            height=46 * len(found),
            mark={"type": "bar", "stroke": PAPER, "strokeWidth": 0.5},
            encoding={
                "y": category("plan", axis={"labelFontSize": 13}),
                "x": number("seconds", "seconds of an epoch", stack="zero"),
                "order": {"field": "order", "type": "ordinal"},
                "color": coloured("part", colours),
                "tooltip": tooltip(
                    ("plan", "plan"),
                    ("part", "part"),
                    ("what", "meaning"),
                    ("seconds", "seconds", ".4~g"),
                    ("share", "share", ".1%"),
                ),
            },
        ),
        legend=boxes(colours),
        table=Table(header=("plan", "part", "time of an epoch", "share", "meaning"), rows=tuple(lines)),
    )


def _compared(found: Sequence[Side]) -> str:
    """Compare the predicted seconds of an epoch with those of the trials."""
    words = []
    for side in found:
        assert isinstance(side.simulated, Simulated)
        predicted = side.simulated.prediction.epoch_seconds * side.simulated.epoch_factor
        known = "not measured" if side.epoch_seconds is None else f"{seconds_text(side.epoch_seconds)} by trials"
        words.append(f"{side.key}: {seconds_text(predicted)} predicted, {known}")
    return f"{'; '.join(words)}.".capitalize()


def gantt(side: Side, longest: float) -> Chart:
    """Chart the passes of a typical simulated step; `longest` is the end of the time axis in seconds."""
    assert isinstance(side.simulated, Simulated)
    line, rows = side.simulated.timeline, _passes(side.simulated, longest)
    count = line.forward.shape[0]
    batches = f"{count} micro-batch{'es' * (count > 1)}"
    idle = side.simulated.prediction.stage_idle
    stages = [f"stage {stage}" for stage in range(line.stages)]
    rank = f" of data rank {line.data_rank}" if side.plan.layout.data > 1 else ""
    all_passes = 2 * count * line.stages
    cut = f" Only the first {_MOST_PASSES} of {all_passes} passes are drawn." if all_passes > _MOST_PASSES else ""
    busy = tuple((stage, share_text(1 - share), share_text(share)) for stage, share in zip(stages, idle, strict=True))
    return Chart(
        id=f"step-{side.key}",
        title=f"One step. {side.title}",
        text=(
            f"A typical step{rank}, {seconds_text(line.seconds)} long, with {batches}. "
            f"Gaps are waiting. Select a pass to follow its micro-batch through the stages.{cut}"
        ),
        summary=(
            f"{line.stages} stages run {batches} forward and backward in "
            f"{seconds_text(line.seconds)}; waiting: " + ", ".join(f"{stage} {waiting}" for stage, _, waiting in busy)
        ),
        basis="predicted",
        spec=_gantt_spec(rows, stages, longest),
        legend=(
            ("forward", COLOURS["forward"], "box"),
            ("backward, with recomputation", COLOURS["backward"], "box"),
            ("reduction and optimizer", COLOURS["update"], "box"),
        ),
        table=Table(header=("stage", "computes", "waits, sends or receives"), rows=busy),
    )


def _passes(simulated: Simulated, longest: float) -> list[Row]:
    line = simulated.timeline
    found = []
    for kind, passes in (("forward", line.forward), ("backward", line.backward)):
        for micro_batch, of_stages in enumerate(passes.tolist()):
            for stage, (begins, ends) in enumerate(of_stages):
                is_wide = ends - begins >= _NUMBERED * len(str(micro_batch)) * longest
                label = str(micro_batch) if is_wide else ""
                found.append((begins, ends, f"stage {stage}", kind, micro_batch, label))
    found.sort()
    ended = [
        (begins, ends, f"stage {stage}", "update", -1, "") for stage, (begins, ends) in enumerate(line.update.tolist())
    ]
    return [
        {
            "begin": round(begins, 6),
            "end": round(ends, 6),
            "stage": stage,
            "pass": kind,
            "micro-batch": number,
            "label": label,
            "seconds": round(ends - begins, 6),
        }
        for begins, ends, stage, kind, number, label in (*found[:_MOST_PASSES], *ended)
    ]


def _gantt_spec(rows: Sequence[Row], stages: Sequence[str], longest: float) -> Spec:
    y = category("stage", order=stages)
    x = number("begin", _TIME, scale={"domain": [0, longest], "nice": False})
    bars: Spec = {
        "params": [{"name": "chosen", "select": {"type": "point", "fields": ["micro-batch"]}}],
        "mark": {
            "type": "bar",
            "stroke": PAPER,
            "strokeWidth": 0.5 if len(rows) < _CROWDED else 0,
            "cursor": "pointer",
        },
        "encoding": {
            "y": y,
            "x": x,
            "x2": {"field": "end"},
            "color": coloured("pass", _PASSES),
            "opacity": {"condition": {"param": "chosen", "value": 1}, "value": 0.2},
            "tooltip": tooltip(
                ("stage", "stage"),
                ("pass", "pass"),
                ("micro-batch", "micro-batch"),
                ("begin", "begins at, s", ".4~g"),
                ("seconds", "takes, s", ".4~g"),
            ),
        },
    }
    narrow = f"(datum.end - datum.begin) * width < {_DIGIT_PIXELS * longest} * length(datum.label)"
    middle: Spec = {
        "transform": [
            {"filter": "datum.label != ''"},
            {"calculate": "(datum.begin + datum.end) / 2", "as": "middle"},
        ],
        "mark": {"type": "text", "color": PAPER, "fontSize": 10, "fontWeight": "bold", "tooltip": None},
        "encoding": {
            "y": y,
            "x": number("middle", _TIME),
            "text": {"field": "label"},
            "opacity": {"condition": {"test": narrow, "value": 0}, "value": 1},
        },
    }
    return spec(
        rows,
        height=(34 if len(stages) <= 8 else 24) * len(stages),
        layer=[bars, *([middle] if any(row["label"] for row in rows) else [])],
    )


def ranks(found: Sequence[Side]) -> Chart:
    """Chart the measured seconds of the ranks in a step, a row for each. All sides are measured."""
    rows: list[Row] = []
    lines: list[tuple[str, ...]] = []
    for side in found:
        for name, spent in _spent(side).items():
            rows += [
                {"rank": name, "part": part, "seconds": round(seconds, 6), "order": order}
                for order, (part, seconds) in enumerate(spent.items())
            ]
            lines.append((name, *map(seconds_text, spent.values()), seconds_text(sum(spent.values()))))
    names = list(dict.fromkeys(row["rank"] for row in rows))
    trials = " and ".join(f"trial {side.run.number} ({side.key})" for side in found if side.run is not None)
    colours = {part: colour for part, (_, colour) in _SPENT.items()}
    return Chart(
        id="ranks",
        title="Time of each rank in a step",
        text=(
            f"Means over the timed steps of {trials}. Ranks that wait much have too little work, or their neighbours "
            "too much. Steps of both plans have about as many samples."
        ),
        summary="; ".join(f"{line[0]}: works {', '.join(line[1:5])}, waits {line[5]}" for line in lines),
        basis="measured",
        spec=spec(
            rows,
            height=26 * len(names),
            mark={"type": "bar", "stroke": PAPER, "strokeWidth": 0.5},
            encoding={
                "y": category("rank", order=names),
                "x": number("seconds", "seconds of a step", stack="zero"),
                "order": {"field": "order", "type": "ordinal"},
                "color": coloured("part", colours),
                "tooltip": tooltip(("rank", "rank"), ("part", "part"), ("seconds", "seconds", ".4~g")),
            },
        ),
        legend=boxes(colours),
        table=Table(header=("rank", *_SPENT, "whole step"), rows=tuple(lines)),
    )


def _spent(side: Side) -> dict[str, dict[str, float]]:
    """Return the seconds of each rank by part; of many ranks, the mean of each stage."""
    assert side.measurement is not None
    measured, layout = side.measurement.stages, side.plan.layout
    groups: dict[str, list[dict[str, float]]] = {}
    for one in measured:
        name = f"{side.key}, stage {one.stage}"
        if layout.data > 1 and len(measured) <= _MOST_RANKS:
            name += f", rank {one.data_rank}"
        groups.setdefault(name, []).append({part: getattr(one, field) for part, (field, _) in _SPENT.items()})
    return {
        name: {part: sum(each[part] for each in several) / len(several) for part in _SPENT}
        for name, several in groups.items()
    }
