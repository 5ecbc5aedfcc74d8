"""Charts of the memory of the stages of a plan, against the limit."""

from collections.abc import Mapping

from autotune.report.charts.chart import (
    COLOURS,
    INK,
    LIMIT,
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
from autotune.report.charts.quantities import Memory
from autotune.report.sides import ComparedPlan
from autotune.report.simulation import Simulated

_PARTS = {
    "static": ("weights, gradients and optimizer states", "var(--grey)"),
    "kept": ("activations kept for the backward pass", "var(--green)"),
    "recomputed": ("inputs and activations of recomputed layers", COLOURS["recompute"]),
    "transient": ("gradients and workspaces of the running layer", "var(--yellow)"),
}


def memory(side: ComparedPlan, memory_limit_bytes: int, most_bytes: float) -> Chart:
    """Chart the predicted parts and the measured peak of each stage; `most_bytes` ends the axis."""
    unit = Memory(most_bytes)
    parts = _predicted(side)
    peaks = side.peak_bytes
    rows: list[Row] = [
        {"stage": f"stage {stage}", "part": part, "what": _PARTS[part][0], "amount": unit.of(amount), "order": order}
        for stage, amounts in enumerate(parts)
        for order, (part, amount) in enumerate(amounts.items())
    ]
    rows += [
        {"stage": f"stage {stage}", "part": "measured peak", "amount": unit.of(peak), "peak": True}
        for stage, peak in peaks.items()
    ]
    lines = tuple(_line(stage, parts, peaks, memory_limit_bytes, unit) for stage in range(len(side.plan.stages)))
    return Chart(
        id=f"memory-{side.key}",
        title=f"Memory of the stages. {side.title}",
        text=(
            "Bars are the predicted parts of each stage's peak on its fullest rank, diamonds the measured peaks, the "
            f"largest of all runs. The line is the limit of {unit.text(memory_limit_bytes)} per rank: memory that is "
            "left could hold activations instead of computing them again."
        ),
        summary="; ".join(f"{line[0]}: predicted {line[5]}, measured {line[6]}, limit {line[7]}" for line in lines),
        basis="measured and predicted" if peaks and parts else "measured" if peaks else "predicted",
        spec=_spec(rows, side, unit, memory_limit_bytes, most_bytes),
        legend=(
            *boxes({f"{part}: {what}": colour for part, (what, colour) in _PARTS.items()}),
            ("measured peak", INK, "diamond"),
            ("limit", LIMIT, "line"),
        ),
        table=Table(
            header=("stage", "static", "kept", "recomputed", "transient", "predicted peak", "measured peak", "limit"),
            rows=lines,
        ),
    )


def most_bytes(side: ComparedPlan, memory_limit_bytes: int) -> float:
    """Return the largest amount that the chart of a side shows."""
    predicted = (sum(amounts.values()) for amounts in _predicted(side))
    return max(memory_limit_bytes, *predicted, *side.peak_bytes.values())


def _predicted(side: ComparedPlan) -> list[dict[str, float]]:
    if not isinstance(side.simulated, Simulated):
        return []
    return [{part: getattr(stage, part) for part in _PARTS} for stage in side.simulated.memory]


def _line(
    stage: int, parts: list[dict[str, float]], peaks: Mapping[int, int], memory_limit_bytes: int, unit: Memory
) -> tuple[str, ...]:
    amounts = parts[stage] if parts else {}
    return (
        f"stage {stage}",
        *(unit.text(amounts[part]) if amounts else "unknown" for part in _PARTS),
        unit.text(sum(amounts.values())) if amounts else "unknown",
        unit.text(peaks[stage]) if stage in peaks else "not measured",
        unit.text(memory_limit_bytes),
    )


def _spec(rows: list[Row], side: ComparedPlan, unit: Memory, memory_limit_bytes: int, most: float) -> Spec:
    y = category("stage", order=[f"stage {stage}" for stage in range(len(side.plan.stages))])
    x = number("amount", f"memory of a rank, {unit.unit}", scale={"domain": [0, unit.of(1.04 * most)], "nice": False})
    lines = tooltip(("stage", "stage"), ("part", "part"), ("what", "meaning"), ("amount", unit.unit, ",.4~g"))
    bars: Spec = {
        # Rows of predicted parts lack the field, which counts as false in Vega's expressions.
        "transform": [{"filter": "!datum.peak"}],
        "mark": {"type": "bar", "stroke": PAPER, "strokeWidth": 0.5},
        "encoding": {
            "y": y,
            "x": {**x, "stack": "zero"},
            "order": {"field": "order", "type": "ordinal"},
            "color": coloured("part", {part: colour for part, (_, colour) in _PARTS.items()}),
            "tooltip": lines,
        },
    }
    peaks: Spec = {
        "transform": [{"filter": "datum.peak"}],
        "mark": {"type": "point", "shape": "diamond", "filled": True, "size": 90, "color": INK, "stroke": PAPER},
        "encoding": {
            "y": y,
            "x": x,
            "tooltip": tooltip(("stage", "stage"), ("amount", f"measured, {unit.unit}", ",.4~g")),
        },
    }
    limit: Spec = {
        "mark": {"type": "rule", "color": LIMIT, "strokeWidth": 2, "strokeDash": [5, 3]},
        "encoding": {"x": {"datum": unit.of(memory_limit_bytes)}},
    }
    stages = len(side.plan.stages)
    has_peaks, has_parts = any("peak" in row for row in rows), any("peak" not in row for row in rows)
    return spec(
        rows,
        height=(34 if stages <= 8 else 24) * stages,
        # Later layers are drawn above: a diamond on the limit stays visible.
        layer=[*([bars] if has_parts else []), limit, *([peaks] if has_peaks else [])],
    )
