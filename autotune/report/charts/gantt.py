"""Gantt chart of a simulated step, and the picture of a step with the memory of its stages."""

from collections.abc import Sequence

import numpy as np

from autotune.prediction.timeline import Timeline
from autotune.report.charts.chart import (
    COLOURS,
    INK,
    LIMIT,
    PAPER,
    PICTURED,
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
from autotune.report.charts.quantities import Memory, percent_text, seconds_text
from autotune.report.sides import ComparedPlan
from autotune.report.simulation import Simulated

_TIME = "seconds from the beginning of the step"
# Choices: Vega-Lite draws each pass as an SVG element of its own.
_MOST_PASSES = 3000
"""Passes of a chart; a browser draws more of them too slowly."""
_CROWDED = 600
"""Passes between which no gaps are drawn, which would hide narrow ones."""
_FAR_OFF = 1.3
"""Ratio of a predicted and a measured step above which a chart says so, a choice: most predictions are nearer."""
_NUMBERED = 0.014
"""Passes of at least this share of the step for each digit carry the number of their micro-batch."""
# About the width of a digit at the chart's font size, with some room.
_DIGIT_PIXELS = 8
_FORWARD, _BACKWARD, _UPDATE = "forward", "backward, with recomputation", "reduction and optimizer"
_WEIGHTS = "deferred weight gradients"
_PASSES = {_FORWARD: COLOURS["forward"], _BACKWARD: COLOURS["backward"], _UPDATE: COLOURS["update"]}
_STATIC, _KEPT, _PEAK = "weights, gradients, optimizer", "kept for backward passes", "peak of the epoch"
_MEMORY = {_STATIC: COLOURS["update"], _KEPT: "var(--green)", _PEAK: INK, "limit": LIMIT}
_WIDTH = 640
"""Pixels of a picture, without its labels."""


def gantt(side: ComparedPlan, longest: float) -> Chart:
    """Chart the passes of a typical simulated step; `longest` is the end of the time axis in seconds."""
    assert isinstance(side.simulated, Simulated)
    line = side.simulated.timeline
    count = line.forward.shape[0]
    batches = f"{count} micro-batch{'es' * (count > 1)}"
    stages = _stages(line)
    rank = f" of data rank {line.data_rank}" if side.plan.layout.data > 1 else ""
    all_passes = (2 + (line.weights is not None)) * count * line.stages
    cut = f" Only the first {_MOST_PASSES} of {all_passes} passes are drawn." if all_passes > _MOST_PASSES else ""
    busy = tuple(
        (stage, percent_text(1 - share), percent_text(share))
        for stage, share in zip(stages, line.waiting_shares, strict=True)
    )
    return Chart(
        id=f"step-{side.key}",
        title=f"One step. {side.title}",
        text=(
            f"A typical step{rank}, {seconds_text(line.seconds)} long{_far_off(side, line)}, with {batches}. "
            f"Gaps are waiting. Select a pass to follow its micro-batch through the stages.{cut}"
        ),
        summary=(
            f"{line.stages} stages run {batches} forward and backward in "
            f"{seconds_text(line.seconds)}; waiting: " + ", ".join(f"{stage} {waiting}" for stage, _, waiting in busy)
        ),
        basis="predicted",
        spec=_passes_spec(line, longest),
        legend=boxes(_colours(line)),
        table=Table(header=("stage", "passes and update", "waits, sends or receives"), rows=busy),
    )


def step(line: Timeline, peak_bytes: Sequence[float], memory_limit_bytes: int) -> Spec:
    """Draw the passes of a step, and below, the memory of each stage with its peak over all steps and the limit."""
    unit = Memory(memory_limit_bytes, *peak_bytes)
    rows: list[Row] = []
    for stage, peak in enumerate(peak_bytes):
        of_stage, base = {"stage": f"stage {stage}"}, unit.of(line.static_bytes[stage])
        for second, amount in np.stack(line.memory(stage), axis=1).tolist():
            at = {**of_stage, "seconds": round(second, 6)}
            rows.append({**at, "what": _STATIC, "least": 0, "most": base})
            rows.append({**at, "what": _KEPT, "least": base, "most": unit.of(amount)})
        levels = {_PEAK: peak, "limit": memory_limit_bytes}
        rows += [{**of_stage, "what": what, "level": unit.of(level)} for what, level in levels.items()]
    x = number("seconds", _TIME, scale={"domain": [0, line.seconds], "nice": False})
    scale = {"domain": [0, unit.of(1.08 * max(memory_limit_bytes, *peak_bytes))], "nice": False}
    y, colour = number("least", unit.unit, scale=scale, axis={"tickCount": 4}), coloured("what", _MEMORY, PICTURED)
    areas = {"x": x, "y": y, "y2": {"field": "most"}, "color": colour}
    memory: Spec = {
        "data": {"values": rows},
        "facet": {"row": category("stage", order=_stages(line), header={"labelFontSize": 12})},
        "spec": {
            "width": _WIDTH,
            "height": 70,
            "layer": [
                {"transform": [{"filter": "!datum.level"}], "mark": {"type": "area", "opacity": 1}, "encoding": areas},
                {
                    "transform": [{"filter": "datum.level"}],
                    "mark": {"type": "rule", "strokeWidth": 1.5, "strokeDash": [5, 3]},
                    "encoding": {"y": {**y, "field": "level"}, "color": colour},
                },
            ],
        },
    }
    views = [_passes_spec(line, line.seconds, is_picture=True), memory]
    return {"vconcat": views, "resolve": {"scale": {"color": "independent"}}}


def _far_off(side: ComparedPlan, line: Timeline) -> str:
    """Say what was measured where it is far from the prediction."""
    measured = side.step_seconds
    if measured is None or max(measured, line.seconds) <= _FAR_OFF * min(measured, line.seconds):
        return ""
    return f" (measured: {seconds_text(measured)}; read its proportions, not its length)"


def _stages(line: Timeline) -> list[str]:
    return [f"stage {stage}" for stage in range(line.stages)]


def _colours(line: Timeline) -> dict[str, str]:
    """Return the colours of passes by what they are."""
    return _PASSES if line.weights is None else {**_PASSES, _WEIGHTS: COLOURS["weights"]}


def _passes(line: Timeline, longest: float, most: int | None) -> list[Row]:
    """Return the first `most` passes, or all of them, and the updates."""
    found = []
    for kind, passes in ((_FORWARD, line.forward), (_BACKWARD, line.backward), (_WEIGHTS, line.weights)):
        if passes is None:
            continue
        for micro_batch, of_stages in enumerate(passes.tolist()):
            for stage, (begins, ends) in enumerate(of_stages):
                is_wide = ends - begins >= _NUMBERED * len(str(micro_batch)) * longest
                label = str(micro_batch) if is_wide else ""
                found.append((begins, ends, f"stage {stage}", kind, micro_batch, label))
    # By their beginning, so that the first ones are drawn where there are too many.
    found.sort()
    ended = [
        # No micro-batch has number -1: the update becomes pale when one is selected.
        (begins, ends, f"stage {stage}", _UPDATE, -1, "")
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
        for begins, ends, stage, kind, number, label in (*found[:most], *ended)
    ]


def _passes_spec(line: Timeline, longest: float, *, is_picture: bool = False) -> Spec:
    rows = _passes(line, longest, None if is_picture else _MOST_PASSES)
    stages = _stages(line)
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
            "color": coloured("pass", _colours(line), PICTURED if is_picture else None),
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
    width = _WIDTH if is_picture else "width"
    narrow = f"(datum.end - datum.begin) * {width} < {_DIGIT_PIXELS * longest} * length(datum.label)"
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
        width=_WIDTH if is_picture else "container",
        layer=[bars, *([middle] if any(row["label"] for row in rows) else [])],
    )
