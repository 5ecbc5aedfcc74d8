"""Charts of packs and of the balance across data ranks, before and after."""

from collections.abc import Sequence

import numpy as np

from autotune.epoch_balance import Balance
from autotune.report.charts.chart import (
    COLOURS,
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
from autotune.report.charts.quantities import percent_text
from autotune.report.sides import ComparedPlan
from autotune.report.simulation import PackedEpoch

# A choice: cells of some pixels, each with enough packs for a colour.
_CELLS = 40
"""In each direction, at most."""
_SIDES = {"before": COLOURS["before"], "after": COLOURS["after"]}


def packs(found: Sequence[ComparedPlan]) -> Chart:
    """Chart the sizes of micro-batches. All sides have packs."""
    rows: list[Row] = []
    lines: list[tuple[str, ...]] = []
    for side in found:
        assert isinstance(side.packs, PackedEpoch)
        sizes = side.packs.epoch.pack_sizes()
        rows += _cells(side.key, sizes.tokens, sizes.units)
        lines.append(
            (
                side.key,
                f"{len(sizes.samples):,}",
                *(
                    f"{values.mean():,.4g} ({values.min():,} to {values.max():,})"
                    for values in (sizes.samples, sizes.units, sizes.tokens, sizes.targets)
                ),
            )
        )
    header = ("plan", "micro-batches", "samples: mean (range)", "vision units", "text tokens with padding", "targets")
    return Chart(
        id="packs",
        title="Sizes of micro-batches",
        text=(
            "Each circle stands for the micro-batches of about this size; larger circles for more of them. "
            "Micro-batches of equal sizes take equal time, so that no rank waits. Made from samples with the lengths "
            "of the stored histogram, in place of the data themselves."
        ),
        summary="; ".join(f"{line[0]}: {line[1]} micro-batches, {line[3]} vision units, {line[4]}" for line in lines),
        basis="predicted",
        spec=spec(
            rows,
            height=300,
            mark={"type": "circle", "opacity": 0.6, "strokeWidth": 1},
            encoding={
                "x": number("tokens", "text tokens of a micro-batch, padding included"),
                "y": number("units", "vision units"),
                "size": number("count", None, legend=None, scale={"range": [12, 600]}),
                "color": coloured("plan", _SIDES),
                "tooltip": tooltip(
                    ("plan", "plan"),
                    ("tokens", "text tokens", ",d"),
                    ("units", "vision units", ",d"),
                    ("count", "packs", ",d"),
                ),
            },
        ),
        legend=boxes({side.key: _SIDES[side.key] for side in found}),
        table=Table(header=header, rows=tuple(lines)),
    )


def _cells(
    plan: str, tokens: "np.ndarray[tuple[int], np.dtype[np.int64]]", units: "np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> list[Row]:
    """Return the cells with packs, each in the middle of its packs."""
    widths = [max(1, int(np.ceil((int(values.max()) + 1) / _CELLS))) for values in (tokens, units)]
    keys = np.stack([tokens // widths[0], units // widths[1]], axis=1)
    _, cell, counts = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    # `ravel`: numpy 2.0 gives the inverse a second dimension, other versions do not.
    middles = [np.rint(np.bincount(cell.ravel(), values) / counts).astype(int).tolist() for values in (tokens, units)]
    return [
        {"plan": plan, "tokens": token, "units": unit, "count": count}
        for token, unit, count in zip(*middles, counts.tolist(), strict=True)
    ]


def waste(found: Sequence[ComparedPlan]) -> Chart:
    """Chart the shares of padding and of waiting across data ranks. All sides have packs."""
    rows: list[Row] = []
    for side in found:
        assert isinstance(side.packs, PackedEpoch)
        rows += [
            {"plan": side.key, "measure": name, "percent": round(100 * share, 3)}
            for name, share in _shares(side.packs.balance).items()
        ]
    names = list(dict.fromkeys(row["measure"] for row in rows))
    values = {(row["measure"], row["plan"]): percent_text(row["percent"] / 100) for row in rows}
    keys = [side.key for side in found]
    lines = tuple((name, *(values[name, key] for key in keys)) for name in names)
    ranks = sorted({side.plan.layout.data for side in found})
    return Chart(
        id="balance",
        title="Padding, and waiting of data ranks",
        text=(
            f"Idle shares are those of {' and '.join(map(str, ranks))} data ranks that meet after every micro-batch; a "
            "single data rank waits for no other. Less is better."
        ),
        summary="; ".join(
            f"{line[0]}: {' before, '.join(line[1:])}{' after' if len(keys) > 1 else ''}" for line in lines
        ),
        basis="predicted",
        spec=spec(
            rows,
            height=20 * len(rows),
            mark={"type": "bar"},
            encoding={
                "y": category("measure", order=names),
                "yOffset": category("plan", order=keys),
                "x": number("percent", "per cent"),
                "color": coloured("plan", {key: _SIDES[key] for key in keys}),
                "tooltip": tooltip(("plan", "plan"), ("measure", "measure"), ("percent", "per cent", ".3~g")),
            },
        ),
        legend=boxes({key: _SIDES[key] for key in keys}),
        table=Table(header=("measure", *keys), rows=lines),
    )


def _shares(balance: Balance) -> dict[str, float]:
    return {
        "padding of text": balance.pad_ratio,
        "idle by vision units": balance.dist_ratio_vision,
        "idle by text tokens": balance.dist_ratio_language,
        "idle by targets": balance.dist_ratio_targets,
        "idle by attention": balance.attention_balance_ratio,
        "idle by model's cost": 1 - balance.cost_efficiency,
    }
