"""Gantt chart of a simulated step."""

from collections.abc import Sequence

from autotune.report.charts.chart import (
    COLOURS,
    PAPER,
    Chart,
    Row,
    Spec,
    Table,
    category,
    coloured,
    number,
    spec,
    tooltip,
)
from autotune.report.charts.quantities import percent_text, seconds_text
from autotune.report.sides import ComparedPlan
from autotune.report.simulation import Simulated

_TIME = "seconds from the beginning of the step"
# Choices: Vega-Lite draws each pass as an SVG element of its own.
_MOST_PASSES = 3000
"""Passes of a chart; a browser draws more of them too slowly."""
_CROWDED = 600
"""Passes between which no gaps are drawn, which would hide narrow ones."""
_NUMBERED = 0.014
"""Passes of at least this share of the step for each digit carry the number of their micro-batch."""
# About the width of a digit at the chart's font size, with some room.
_DIGIT_PIXELS = 8
_PASSES = {"forward": COLOURS["forward"], "backward": COLOURS["backward"], "update": COLOURS["update"]}


def gantt(side: ComparedPlan, longest: float) -> Chart:
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
    busy = tuple(
        (stage, percent_text(1 - share), percent_text(share)) for stage, share in zip(stages, idle, strict=True)
    )
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
    # By their beginning, so that the first ones are drawn where there are too many.
    found.sort()
    ended = [
        # No micro-batch has number -1: the update becomes pale when one is selected.
        (begins, ends, f"stage {stage}", "update", -1, "")
        for stage, (begins, ends) in enumerate(line.update.tolist())
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
    # Decided in the browser, which alone knows how wide the page is.
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
