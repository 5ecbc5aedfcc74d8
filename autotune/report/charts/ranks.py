"""Chart of the measured time of the ranks in a step."""

from collections.abc import Sequence

from autotune.report.charts.chart import (
    COLOURS,
    PAPER,
    Chart,
    Row,
    Table,
    boxes,
    category,
    coloured,
    number,
    spec,
    tooltip,
)
from autotune.report.charts.quantities import seconds_text
from autotune.report.sides import ComparedPlan

# A choice: rows that fit a screen.
_MOST_RANKS = 24
"""Ranks that get a row each; of more, the means of each stage are shown."""
_SPENT = {
    "loading": ("load_seconds", COLOURS["loading"]),
    "forward": ("forward_seconds", COLOURS["forward"]),
    "backward": ("backward_seconds", COLOURS["backward"]),
    "update": ("optimizer_seconds", COLOURS["update"]),
    "waiting": ("idle_seconds", COLOURS["waiting"]),
}


def ranks(found: Sequence[ComparedPlan]) -> Chart:
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
        title="Time of the ranks in a step",
        text=(
            f"Means over the timed steps of {trials}, with {' and '.join(map(_samples, found))} samples in a step. "
            f"Ranks that wait much have too little work, or their neighbours too much.{_joined(found)}"
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


def _joined(found: Sequence[ComparedPlan]) -> str:
    """Say where a row stands for several ranks."""
    joined = [side.key for side in found if not _has_rows(side)]
    return f" Rows of {' and '.join(joined)} are means over the ranks of a stage." if joined else ""


def _has_rows(side: ComparedPlan) -> bool:
    """Return whether each rank has a row of its own."""
    layout = side.plan.layout
    return layout.world_size <= max(_MOST_RANKS, layout.pipeline)


def _samples(side: ComparedPlan) -> str:
    assert side.measurement is not None
    return f"{side.measurement.samples / len(side.measurement.steps):.1f}"


def _spent(side: ComparedPlan) -> dict[str, dict[str, float]]:
    """Return the seconds of each rank by part; of many ranks, the mean of each stage."""
    assert side.measurement is not None
    measured, layout = side.measurement.stages, side.plan.layout
    groups: dict[str, list[dict[str, float]]] = {}
    for one in measured:
        name = f"{side.key}, stage {one.stage}"
        if layout.data > 1 and _has_rows(side):
            name += f", rank {one.data_rank}"
        if layout.tensor > 1 and _has_rows(side):
            name += f", tensor rank {one.tensor_rank}"
        groups.setdefault(name, []).append({part: getattr(one, field) for part, (field, _) in _SPENT.items()})
    return {
        name: {part: sum(each[part] for each in several) / len(several) for part in _SPENT}
        for name, several in groups.items()
    }
