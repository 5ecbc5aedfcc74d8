"""Chart of the measured costs of each kind of layer."""

from autotune.forecast.profile_file import ProfiledCosts
from autotune.prediction.costs_table import TypicalPack
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
from autotune.report.charts.quantities import bytes_text, seconds_text
from trials.workload import Workload

_PASSES = {
    "forward": COLOURS["forward"],
    "backward": COLOURS["backward"],
    "recomputation": COLOURS["recompute"],
}


def layers(profile: ProfiledCosts, work: Workload) -> Chart:
    """Chart the seconds of one layer of each kind, for a pack of mean samples."""
    pack = TypicalPack.of(work.data)
    rows, lines = _rows(profile, work, pack)
    return Chart(
        id="layers",
        title="Cost of one layer of each kind",
        text=(
            f"Fitted to layers that were timed alone on {profile}, for a pack of {pack.samples} mean samples: "
            f"{pack.units:.1f} vision units and {pack.tokens:.0f} text tokens with {pack.targets:.0f} targets, on "
            "which alone the head runs. Recomputation is what a recomputed layer takes in addition."
        ),
        summary="; ".join(f"{line[0]}: forward {line[2]}, backward {line[3]}" for line in lines),
        basis="measured",
        spec=spec(
            rows,
            height=30 * len(lines),
            mark={"type": "bar", "stroke": PAPER, "strokeWidth": 0.5},
            encoding={
                "y": category("layer"),
                "x": number("ms", "milliseconds of one layer", stack="zero"),
                "order": {"field": "order", "type": "ordinal"},
                "color": coloured("pass", _PASSES),
                "tooltip": tooltip(("layer", "layer"), ("pass", "pass"), ("ms", "ms", ".4~g")),
            },
        ),
        legend=boxes(_PASSES),
        table=Table(
            header=("layer", "layers", *_PASSES, "kept bytes", "parameters", "error of the fit"), rows=tuple(lines)
        ),
    )


def _rows(profile: ProfiledCosts, work: Workload, pack: TypicalPack) -> tuple[list[Row], list[tuple[str, ...]]]:
    """Return the rows of the chart, and of its table."""
    counts = {"vision": work.model.vision_layers, "language": work.model.language_layers}
    rows: list[Row] = []
    lines: list[tuple[str, ...]] = []
    for kind, cost in profile.costs.layers:
        # The model has no layer of this kind.
        if not cost.parameters:
            continue
        name = kind.replace("_", " ")
        seconds = dict(zip(_PASSES, pack.seconds(profile.costs, kind), strict=True))
        rows += [
            {"layer": name, "pass": part, "ms": round(value * 1e3, 4), "order": order}
            for order, (part, value) in enumerate(seconds.items())
        ]
        lines.append(
            (
                name,
                str(counts.get(kind, 1)),
                *map(seconds_text, seconds.values()),
                bytes_text(pack.kept_bytes(profile.costs, kind)),
                f"{cost.parameters:,}",
                f"{cost.seconds_error:.1%}{', noisy' if cost.is_noisy else ''}",
            )
        )
    return rows, lines
