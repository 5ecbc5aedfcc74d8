"""Plot of the balance before and after packing, for a paper or a report."""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autotune.epoch_balance import dist_ratios
from autotune.errors import PackError
from autotune.output_file import check_output_file, whole
from autotune.packing.balance import UNPACKED, Balanced
from trials.arrays import Floats, Ints
from trials.data.epoch import CostWeights, PackSizes
from trials.plan import Packed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

KINDS = (".png", ".svg", ".pdf")
_BEFORE, _AFTER, _CAPACITY = "#b5522a", "#1f5f8b", "#333333"
_LABEL_BOX = {"boxstyle": "square,pad=0", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
_CELLS = 60
"""In each direction, at most."""
_IDLE = (0.01, 1, 100)
"""Per cent; rows with less idle time than the first are drawn there."""
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    # Text stays text, so that a paper can set it in its own font.
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}

_LOADS: Mapping[str, Callable[[PackSizes, CostWeights], Ints | Floats]] = {
    "vision units": lambda sizes, _: sizes.units,
    "text tokens": lambda sizes, _: sizes.tokens,
    "targets": lambda sizes, _: sizes.targets,
    "squared lengths": lambda sizes, _: sizes.squares,
    "predicted cost": lambda sizes, weights: sizes.cost(weights),
}
"""The kinds of load by which ranks of a row may be out of balance."""


def check_plot(path: Path) -> None:
    """Check, before any work is done, that `plot` can draw into this file. Raise PackError."""
    check_output_file(path, KINDS)
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise PackError("a plot needs matplotlib; pip install matplotlib") from error


def plot(found: Balanced, path: Path) -> None:
    """Draw into a file of the kind that its suffix names. Raise PackError when it cannot be written."""
    from matplotlib import rc_context  # noqa: PLC0415 - an extra, and slow to load
    from matplotlib.figure import Figure  # noqa: PLC0415

    with rc_context(_STYLE), whole(path) as partial:
        figure = Figure(figsize=(7.2, 5.4), layout="constrained")
        grid = figure.add_gridspec(2, 1, height_ratios=(1.3, 1))
        _draw_sizes(figure.add_subfigure(grid[0]), found)
        _draw_idle(figure.add_subfigure(grid[1]), found)
        figure.savefig(partial, dpi=200, format=path.suffix[1:])


def _draw_sizes(figure: "SubFigure", found: Balanced) -> None:
    """Draw the micro-batches by text tokens and vision units, before and after."""
    from matplotlib.colors import LogNorm  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    sides = (found.before, found.after)
    sizes = [side.epoch.pack_sizes() for side in sides]
    edges = [
        _edges(np.concatenate([size.tokens for size in sizes]), found.packing.qt),
        _edges(np.concatenate([size.units for size in sizes]), found.packing.qv),
    ]
    shares = [_shares(size, edges) for size in sizes]
    norm = LogNorm(min(share[share > 0].min() for share in shares), max(share.max() for share in shares))
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    mean = found.after.balance.samples_per_pack.mean
    titles = f"before: {UNPACKED.samples} random samples, padded", f"after: packs of {mean:.1f} samples on average"
    for place, title, share in zip(axes, titles, shares, strict=True):
        # Empty cells are masked, as a logarithmic scale has no 0. Rasterized, since an SVG would have a path per cell.
        mesh = place.pcolormesh(*edges, np.ma.masked_equal(share.T, 0), norm=norm, cmap="viridis_r", rasterized=True)
        place.set(title=title, xlabel="text tokens of a micro-batch")
    axes[0].set_ylabel("vision units of a micro-batch")
    axes[0].set(xlim=(0, None), ylim=(0, None))
    axes[0].yaxis.set_major_locator(MaxNLocator(integer=True))
    _draw_capacities(axes[1], found.packing)
    figure.colorbar(mesh, ax=axes, label="share of micro-batches", pad=0.01)


def _draw_capacities(place: "Axes", packing: Packed) -> None:
    line: dict[str, Any] = {"color": _CAPACITY, "linewidth": 0.8, "linestyle": "--"}
    place.axvline(packing.qt + 0.5, **line)  # behind the cells that a pack may be in
    place.axhline(packing.qv + 0.5, **line)
    # Beyond a capacity there are only packs of one over-size sample, so these labels cover few cells.
    text: dict[str, Any] = {"color": _CAPACITY, "textcoords": "offset points", "bbox": _LABEL_BOX}
    at_top = (packing.qt + 0.5, 1)
    place.annotate(
        f"Qt = {packing.qt}", at_top, (-3, -3), place.get_xaxis_transform(), ha="right", va="top", rotation=90, **text
    )
    # In the half without the label of Qt, which is as high where no pack is beyond Qv.
    side, edge, offset = ("right", 1, -3) if 2 * packing.qt < place.get_xlim()[1] else ("left", 0, 3)
    at_side = (edge, packing.qv + 0.5)
    place.annotate(f"Qv = {packing.qv}", at_side, (offset, 3), place.get_yaxis_transform(), ha=side, **text)


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


def _draw_idle(figure: "SubFigure", found: Balanced) -> None:
    """Draw the cumulative distribution of the rows' idle share, for each kind of load."""
    axes = figure.subplots(1, len(_LOADS), sharex=True, sharey=True)
    arrow = r" $\rightarrow$ "
    sides = ((found.before, "before", _BEFORE), (found.after, "after", _AFTER))
    for place, (name, load) in zip(axes, _LOADS.items(), strict=True):
        means: list[str] = []
        for side, label, color in sides:
            loads = load(side.epoch.pack_sizes(), found.material.settings.weights)
            idle = np.sort(dist_ratios(loads[side.epoch.assignment])) * 100
            share = np.arange(1, len(idle) + 1) / len(idle)
            place.step(np.maximum(idle, _IDLE[0]), share, where="post", color=color, label=label)
            means.append(f"{idle.mean():.2g}")
        place.set(title=f"{name}\nmean {arrow.join(means)} %", xscale="log", xlim=(_IDLE[0], _IDLE[-1]))
        place.set_xticks(_IDLE, [f"$\\leq${_IDLE[0]}", *(f"{idle:g}" for idle in _IDLE[1:])])
        place.minorticks_off()
        place.grid(alpha=0.25, linewidth=0.5)
    axes[0].set(ylabel="share of rows", ylim=(0, 1.02))
    axes[0].legend(*axes[0].get_legend_handles_labels(), loc="center left", handlelength=1)
    figure.supxlabel(
        f"idle share of the {found.material.data_parallel} data ranks in a row of micro-batches [%]",
        fontsize="medium",
    )
