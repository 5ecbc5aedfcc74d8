"""Draw the figures of docs/imbalances.md: data, model and memory, before and after balancing.

    python -m benchmarks.figures

The numbers come from autotune's own packers, solver, memory model and simulation, for random lengths, and for
InternViT-300M with InternLM2-7B on 16 analytic devices. Each figure keeps its numbers in its metadata, where a test
compares them.
"""

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autotune.prediction.predictor import Predictor
from autotune.prediction.timeline import timeline
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from benchmarks.cases.solver import INTERN_LM2_7B, INTERN_VIT_300M, Case, lengths
from benchmarks.packing import WEIGHTS
from trials.data.epoch import EpochSettings, build_epoch
from trials.plan import Layout, Packed, Packing, Padded, Plan, Stage, layer_counts

IMAGES = Path(__file__).parents[1] / "docs" / "images"
FIGURES = ("data", "model", "memory")

_RANKS, _BATCH, _GIBI = 8, 256, 1 << 30
_STAGES, _MICRO_BATCHES = 4, 6
_PACKS = Packed(qv=9, qt=4096, qv_min=9, qt_min=3968, packer="best-fit")
_CASE = Case(
    name="figures",
    vision=INTERN_VIT_300M,
    language=INTERN_LM2_7B,
    tensor=1,
    data="tiles up to 5",
    packing=_PACKS,
    layout=Layout(pipeline=_STAGES, data=4, zero=1),
    micro_batches=_MICRO_BATCHES,
    room=0.5,
)
_WORK, _LOST, _WAITING, _TEXT = "#1f5f8b", "#d08b4c", "#e3e8eb", "#333333"
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "svg.fonttype": "none",
    "svg.hashsalt": "autotune",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}


def numbers(figure: str) -> dict[str, Any]:
    """Compute what a figure shows, rounded."""
    return {"data": _data, "model": _model, "memory": _memory}[figure]()


# --- computing ---


def _data() -> dict[str, Any]:
    """Return the work of each data rank in the first step, per sample, as a share of the padded step."""
    sides = {"4 samples, padded": _ranks_work(Padded(samples=4)), "packs": _ranks_work(_PACKS)}
    whole = sides["4 samples, padded"]["step"]
    return {
        name: {part: _rounded(np.divide(value, whole)) for part, value in side.items()} for name, side in sides.items()
    }


def _ranks_work(packing: Packing) -> dict[str, Any]:
    """Return the forward operations of the first step: of samples, of padding, and of the slowest rank of each row."""
    index = lengths(_CASE.data, seed=0)
    epoch = build_epoch(
        index, packing, EpochSettings(global_batch_samples=_BATCH, weights=WEIGHTS), data_parallel=_RANKS
    )
    step = epoch.rows(0)
    computed = epoch.pack_sizes().cost(WEIGHTS)[step]
    tokens = index.text_tokens.astype(np.int64)
    units, tokens, squares = (epoch.packs.sums(size)[step] for size in (index.vision_units, tokens, tokens**2))
    own = WEIGHTS.unit * units + WEIGHTS.token * tokens + WEIGHTS.square * squares
    parts = {"samples": own.sum(axis=0), "padding": (computed - own).sum(axis=0), "step": computed.max(axis=1).sum()}
    return {name: value / epoch.packs.counts[step].sum() for name, value in parts.items()}


def _model() -> dict[str, Any]:
    """Return the passes of a typical step, in ms, for equal numbers of layers and for the solver's split."""
    predictor = _CASE.predictor()
    ample = Solver(predictor, _CASE.limits(1 << 62))
    return {
        "the same number of layers on each stage": _passes(predictor, _equal()),
        "balanced by time": _passes(predictor, _found(ample)),
    }


def _passes(predictor: Predictor, plan: Plan) -> dict[str, Any]:
    prediction = predictor.predict(plan)
    step = timeline(predictor, plan, prediction)
    return {
        "split": _split(plan),
        "milliseconds": round(1e3 * step.seconds),
        "idle": round(prediction.idle_share, 3),
        "forward": _rounded(1e3 * step.forward, 1),
        "backward": _rounded(1e3 * step.backward, 1),
        "update": _rounded(1e3 * step.update, 1),
    }


def _memory() -> dict[str, Any]:
    """Return the GiB of each stage, for three choices of recomputed layers of the balanced split."""
    predictor = _CASE.predictor()
    tight = _CASE.tight_limits(predictor)
    kept = _found(Solver(predictor, _CASE.limits(1 << 62)))
    plans = {
        "nothing recomputed": kept,
        "everything recomputed": replace(
            kept,
            stages=tuple(
                replace(one, recompute_vision=one.vision, recompute_language=one.language) for one in kept.stages
            ),
        ),
        "as much as is needed": _found(Solver(predictor, tight)),
    }
    return {"limit": _gibi(tight), "plans": {name: _stages(predictor, plan) for name, plan in plans.items()}}


def _stages(predictor: Predictor, plan: Plan) -> dict[str, Any]:
    prediction = predictor.predict(plan)
    steps = prediction.step_seconds
    return {
        "recomputed": [one.recompute_vision + one.recompute_language for one in plan.stages],
        "static": [round(one.static / _GIBI, 2) for one in prediction.stage_memory],
        "peak": [round(one.expected / _GIBI, 2) for one in prediction.stage_memory],
        "milliseconds": round(1e3 * float(steps.mean())),
    }


def _equal() -> Plan:
    total = _CASE.vision.layers + _CASE.language.layers
    each = [total // _STAGES + (number < total % _STAGES) for number in range(_STAGES)]
    held = layer_counts(tuple(accumulate(each)), _CASE.vision.layers)
    stages = tuple(Stage(vision=v, language=n, recompute_vision=0, recompute_language=0) for v, n in held)
    return Plan(packing=_PACKS, layout=_CASE.layout, stages=stages)


def _found(solver: Solver) -> Plan:
    plan = solver.solve(_PACKS, _CASE.layout)
    assert plan is not None, "the limit of the case leaves room for a plan"
    return plan


def _split(plan: Plan) -> list[str]:
    return [f"{stage.vision}v+{stage.language}l" for stage in plan.stages]


def _gibi(limits: Limits) -> float:
    return round(limits.memory_limit_bytes / _GIBI, 2)


def _rounded(values: Any, digits: int = 3) -> Any:
    return np.round(values, digits).tolist()


# --- drawing ---


def draw(figure: str, path: Path) -> None:
    """Draw a figure as SVG."""
    shown = numbers(figure)
    with rc_context(_STYLE):
        drawing = Figure(figsize=(7.2, 3.4 if figure == "model" else 2.8), layout="constrained")
        {"data": _draw_data, "model": _draw_model, "memory": _draw_memory}[figure](drawing, shown)
        # No date: two drawings of the same numbers are the same file.
        drawing.savefig(path, format="svg", metadata={"Date": None, "Description": json.dumps(shown)})


def _draw_data(drawing: Figure, shown: dict[str, Any]) -> None:
    for place, (name, side) in zip(drawing.subplots(1, 2, sharey=True), shown.items(), strict=True):
        ranks = range(len(side["samples"]))
        own, computed = np.array(side["samples"]), np.add(side["samples"], side["padding"])
        place.bar(ranks, own, color=_WORK, label="work of the samples")
        place.bar(ranks, computed - own, bottom=own, color=_LOST, label="padding")
        place.bar(ranks, side["step"] - computed, bottom=computed, color=_WAITING, label="waiting for slower ranks")
        place.set_title(f"{name}: step of {side['step']:.0%}", loc="left", fontsize=9)
        place.set(xlabel="data rank", xticks=list(ranks), ylim=(0, 1.05))
        place.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    handles, labels = place.get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=3)


def _draw_model(drawing: Figure, shown: dict[str, Any]) -> None:
    longest = max(side["milliseconds"] for side in shown.values())
    for place, (name, side) in zip(drawing.subplots(2, 1, sharex=True), shown.items(), strict=True):
        for stage in range(_STAGES):
            for key, colour in (("forward", _WORK), ("backward", _LOST)):
                spans = [(passes[stage][0], passes[stage][1] - passes[stage][0]) for passes in side[key]]
                place.broken_barh(spans, (stage - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.5)
            begins, ends = side["update"][stage]
            place.broken_barh([(begins, ends - begins)], (stage - 0.4, 0.8), facecolor=_WAITING)
        title = f"{name}: {side['milliseconds'] / 1e3:.2f} s, idle {side['idle']:.0%}"
        place.set_title(title, loc="left", fontsize=9)
        place.set_yticks(range(_STAGES), [f"stage {n}: {held}" for n, held in enumerate(side["split"])])
        place.set(ylim=(_STAGES - 0.5, -0.5), xlim=(0, longest))
        place.tick_params(axis="y", length=0)
    place.set_xlabel("milliseconds; blue is forward, orange backward, grey reduction and optimizer, white waiting")


def _draw_memory(drawing: Figure, shown: dict[str, Any]) -> None:
    places: list[Axes] = list(drawing.subplots(1, len(shown["plans"]), sharey=True))
    for place, (name, side) in zip(places, shown["plans"].items(), strict=True):
        stages, static, peak = range(_STAGES), np.array(side["static"]), np.array(side["peak"])
        place.bar(stages, static, color=_WORK, label="weights, gradients, optimizer")
        place.bar(stages, peak - static, bottom=static, color=_LOST, label="kept for backward passes")
        place.axhline(shown["limit"], color=_TEXT, linewidth=1, linestyle="--", label="limit")
        title = f"{name}\nstep of {side['milliseconds'] / 1e3:.2f} s"
        place.set_title(title, loc="left", fontsize=9)
        place.set_xticks(stages, [f"{n}\n{again}" for n, again in enumerate(side["recomputed"])])
        place.set_xlabel("stage, recomputed layers")
    places[0].set_ylabel("GiB")
    handles, labels = places[0].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower center", ncols=3)


if __name__ == "__main__":
    for name in FIGURES:
        draw(name, IMAGES / f"imbalance-{name}.svg")
