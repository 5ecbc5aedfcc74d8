"""The picture of the balance before and after packing, for a paper."""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from autotune.epoch_balance import dist_ratios
from autotune.packing.balance import UNPACKED, Balanced
from autotune.report.charts.chart import COLOURS, INK, Row, Spec, category, coloured, number
from trials.arrays import Floats, Ints
from trials.data.epoch import CostWeights, PackSizes

_CELLS = 60
"""In each direction, at most."""
_SIDES = {"before": COLOURS["before"], "after": COLOURS["after"]}
_LOADS: Mapping[str, Callable[[PackSizes, CostWeights], Ints | Floats]] = {
    "vision units": lambda sizes, _: sizes.units,
    "text tokens": lambda sizes, _: sizes.tokens,
    "targets": lambda sizes, _: sizes.targets,
    "squared lengths": lambda sizes, _: sizes.squares,
    "predicted cost": lambda sizes, weights: sizes.cost(weights),
}
"""The kinds of load by which ranks of a row may be out of balance."""
_IDLE = (0.01, 1, 100)
"""Per cent; rows with less idle time than the first are drawn there."""
_STEPS = 200
"""Most points of a curve."""


def balance(found: Balanced) -> Spec:
    """Draw the micro-batches by their sizes, and the idle shares of their rows, before and after."""
    own_legends = {"resolve": {"scale": {"color": "independent"}}}
    return {
        "vconcat": [{"hconcat": _sizes(found), **own_legends}, _idle(found)],
        **own_legends,
        "config": {"title": {"fontSize": 12, "fontWeight": "normal"}, "header": {"labelFontSize": 12}},
    }


def _sizes(found: Balanced) -> list[Spec]:
    """Draw the shares of micro-batches by text tokens and vision units, before and after."""
    packing, sizes = found.packing, [side.epoch.pack_sizes() for side in (found.before, found.after)]
    edges = [
        _edges(np.concatenate([size.tokens for size in sizes]), packing.qt),
        _edges(np.concatenate([size.units for size in sizes]), packing.qv),
    ]
    shares = [_shares(size, edges) for size in sizes]
    limits = [min(share[share > 0].min() for share in shares), max(share.max() for share in shares)]
    mean = found.after.balance.samples_per_pack.mean
    titles = f"before: {UNPACKED.samples} random samples, padded", f"after: packs of {mean:.1f} samples on average"
    whole = {"tickCount": 4, "tickMinStep": 1}
    tokens, units = ({"scale": {"domain": [0, edge[-1]], "nice": False}, "axis": whole} for edge in edges)
    views: list[Spec] = []
    for title, share in zip(titles, shares, strict=True):
        encoding: Spec = {
            "x": number("left", "text tokens of a micro-batch", **tokens),
            "x2": {"field": "right"},
            "y": number("low", None if views else "vision units of a micro-batch", **units),
            "y2": {"field": "high"},
            "color": number(
                "share",
                ["share of", "micro-batches"],
                scale={"type": "log", "scheme": "viridis", "reverse": True, "domain": limits, "nice": False},
                legend={"gradientLength": 200, "tickCount": 4, "format": ".0e"} if views else None,
            ),
        }
        cells: Spec = {"mark": {"type": "rect", "clip": True}, "encoding": encoding}
        views.append({"title": title, "width": 290, "height": 230, "layer": [{**cells, **_cells(share, edges)}]})
    # In the half without the label of Qt, which is as high where no micro-batch is beyond Qv.
    is_right = 2 * packing.qt < edges[0][-1]
    side = {"align": "right", "x": "width", "dx": -3} if is_right else {"align": "left", "x": 0, "dx": 3}
    top = {"align": "right", "angle": 270, "y": 3}
    views[-1]["layer"] += [
        *_capacity(packing.qt, {"x": {**encoding["x"], "field": "at"}}, {"text": f"Qt = {packing.qt}", **top}),
        *_capacity(packing.qv, {"y": {**encoding["y"], "field": "at"}}, {"text": f"Qv = {packing.qv}", **side}),
    ]
    return views


def _capacity(capacity: int, encoding: Spec, label: Spec) -> list[Spec]:
    """Draw a line behind the cells that a pack may be in."""
    data = {"values": [{"at": capacity + 0.5}]}
    return [
        {"data": data, "mark": {"type": "rule", "color": INK, "strokeDash": [5, 3]}, "encoding": encoding},
        {"data": data, "mark": {"type": "text", "color": INK, "dy": -7, **label}, "encoding": encoding},
    ]


def _cells(share: Floats, edges: Sequence[Floats]) -> Spec:
    found = np.argwhere(share)
    places = [each for edge, at in zip(edges, found.T, strict=True) for each in (edge[at], edge[at + 1])]
    rows = np.column_stack([*places, share[tuple(found.T)]]).tolist()
    names = ("left", "right", "low", "high", "share")
    return {"data": {"values": [dict(zip(names, row, strict=True)) for row in rows]}}


def _shares(sizes: PackSizes, edges: Sequence[Floats]) -> Floats:
    """Return the share of packs in each cell, [cells of tokens, cells of units]; the last cells include all beyond."""
    tokens, units = (
        np.clip(values, edge[0], edge[-1]) for values, edge in zip((sizes.tokens, sizes.units), edges, strict=True)
    )
    counts, *_ = np.histogram2d(tokens, units, bins=edges)
    shares: Floats = counts / counts.sum()
    return shares


def _edges(values: Ints, capacity: int) -> Floats:
    """Return edges of cells of whole numbers, from 0 to above the capacity and all but the largest values.

    One of the edges is that of the capacity.
    """
    most = max(float(np.percentile(values, 99.9)), capacity) * 1.04
    width = max(1, math.ceil(most / _CELLS))
    first = (capacity + 1) % width - width
    return np.arange(first, most + width + 1, width) - 0.5


def _idle(found: Balanced) -> Spec:
    """Draw the cumulative distribution of the rows' idle share, for each kind of load."""
    rows: list[Row] = []
    for name, load in _LOADS.items():
        idle = {}
        for side, epoch in (("before", found.before.epoch), ("after", found.after.epoch)):
            loads = load(epoch.pack_sizes(), found.material.settings.weights)
            idle[side] = 100 * np.sort(dist_ratios(loads[epoch.assignment]))
        title = "{}\nmean {:.2g} \u2192 {:.2g} %".format(name, *(percent.mean() for percent in idle.values()))
        for side, percent in idle.items():
            for place in np.unique(np.linspace(0, len(percent) - 1, _STEPS).astype(int)).tolist():
                shown = max(float(percent[place]), _IDLE[0])
                rows.append({"load": title, "side": side, "idle": shown, "share": (place + 1) / len(percent)})
    lowest = f"datum.value > {_IDLE[0]} ? datum.label : '\u2264 ' + datum.label"
    x = {"scale": {"type": "log", "domain": [_IDLE[0], _IDLE[-1]]}, "axis": {"values": _IDLE, "labelExpr": lowest}}
    title = f"idle share of the {found.material.data_parallel} data ranks in a row of micro-batches, per cent"
    header = {"labelExpr": "split(datum.value, '\\n')", "titleOrient": "bottom", "titleFontWeight": "normal"}
    order = list(dict.fromkeys(row["load"] for row in rows))
    return {
        "data": {"values": rows},
        "facet": {"column": category("load", order=order, title=title, header=header)},
        "spec": {
            "width": 105,
            "height": 120,
            "mark": {"type": "line", "interpolate": "step-after"},
            "encoding": {
                "x": number("idle", None, **x),
                "y": number("share", "share of rows", scale={"domain": [0, 1]}, axis={"tickCount": 4}),
                "color": coloured("side", _SIDES, {"title": None, "symbolType": "stroke"}),
            },
        },
    }
