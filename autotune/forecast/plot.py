"""Plot of a typical step: passes and memory of each stage."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.forecast.forecast import Forecast
from autotune.output_file import whole
from autotune.packing.plot import check_plot
from autotune.prediction.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_plot", "plot"]

_FORWARD, _BACKWARD, _UPDATE, _KEPT, _LIMIT = "#1f5f8b", "#b5522a", "#7a7a7a", "#4f8a5b", "#333333"
_MEBI = 1 << 20
_NUMBERED = 0.012
"""Passes of at least this share of the step for each digit carry the number of their micro-batch."""
_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text, so that a paper can set it in its own font
    "pdf.fonttype": 42,  # TrueType, which publishers ask for
}


def plot(forecast: Forecast, path: Path) -> None:
    """Write the plot to a file of the kind that its suffix names. Raise PackError when it cannot be written."""
    from matplotlib import rc_context  # noqa: PLC0415 - an extra, and slow to load
    from matplotlib.figure import Figure  # noqa: PLC0415

    timeline = forecast.timeline
    height = 1.2 + 0.95 * timeline.stages
    with rc_context(_STYLE), whole(path) as partial:
        figure = Figure(figsize=(7.2, height), layout="constrained")
        ratios = [0.5 * timeline.stages, *([1] * timeline.stages)]
        axes = figure.subplots(1 + timeline.stages, 1, sharex=True, height_ratios=ratios)
        _draw_passes(axes[0], timeline)
        for stage, place in enumerate(axes[1:]):
            _draw_memory(place, forecast, stage)
        axes[0].set_xlim(0, timeline.seconds)
        axes[-1].set_xlabel("seconds from the beginning of the step")
        figure.savefig(partial, dpi=200, format=path.suffix[1:])


def _draw_passes(place: "Axes", timeline: Timeline) -> None:
    """Draw a row for each stage, the first on top."""
    from matplotlib.patches import Patch  # noqa: PLC0415

    place.spines["left"].set_visible(False)
    for stage in range(timeline.stages):
        for passes, colour in ((timeline.forward, _FORWARD), (timeline.backward, _BACKWARD)):
            spans = [(begins, ends - begins) for begins, ends in passes[:, stage]]
            place.broken_barh(spans, (stage - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.4)
            for number, (begins, length) in enumerate(spans):
                if length >= _NUMBERED * len(str(number)) * timeline.seconds:
                    middle = (begins + length / 2, stage)
                    place.text(*middle, str(number), color="white", ha="center", va="center", fontsize=6)
        begins, ends = timeline.update[stage]
        place.broken_barh([(begins, ends - begins)], (stage - 0.4, 0.8), facecolor=_UPDATE)
    place.set_yticks(range(timeline.stages), [f"stage {stage}" for stage in range(timeline.stages)])
    place.tick_params(axis="y", length=0)
    place.set_ylim(timeline.stages - 0.5, -0.5)
    names = {"forward": _FORWARD, "backward": _BACKWARD, "reduction and optimizer": _UPDATE}
    handles = [Patch(facecolor=colour, label=name) for name, colour in names.items()]
    place.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(names), handlelength=1)


def _draw_memory(place: "Axes", forecast: Forecast, stage: int) -> None:
    """Draw the memory of the stage in this step, its peak over all steps, and the limit."""
    timeline, limit = forecast.timeline, forecast.memory_limit_bytes / _MEBI
    times, kept = timeline.memory(stage)
    static, needed = timeline.static_bytes[stage] / _MEBI, forecast.prediction.stage_bytes[stage] / _MEBI
    kept_label, static_label = "kept for backward passes", "weights, gradients, optimizer"
    place.fill_between(times, static, kept / _MEBI, color=_KEPT, alpha=0.6, linewidth=0, label=kept_label)
    place.fill_between([0, timeline.seconds], 0, static, color=_UPDATE, alpha=0.4, linewidth=0, label=static_label)
    place.axhline(needed, color=_KEPT, linewidth=1, linestyle=":", label="peak of the epoch")
    place.axhline(limit, color=_LIMIT, linewidth=0.8, linestyle="--", label="limit")
    most = max(limit, max(forecast.prediction.stage_bytes) / _MEBI)
    place.set(ylim=(0, most * 1.08), ylabel=f"stage {stage}\nMiB")
    if not stage:
        place.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=4, handlelength=1.5)
