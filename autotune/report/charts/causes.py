"""Chart of the causes of the time of an epoch."""

from collections.abc import Sequence

from autotune.report.charts.chart import (
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
from autotune.report.charts.quantities import seconds_text, share_text
from autotune.report.sides import Side
from autotune.report.simulation import Simulated
from autotune.results.time_parts import MEANINGS

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
