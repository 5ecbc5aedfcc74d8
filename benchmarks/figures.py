"""Draw the figures of docs/imbalances.md: data, model and memory, before and after balancing.

    python -m benchmarks.figures

The numbers come from autotune's own packers, solver, memory model and simulation, for random lengths, and for
InternViT-300M with InternLM2-7B on 16 analytic devices. Each figure keeps its numbers as its description, where a test
compares them.
"""

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from autotune.prediction.predictor import Predictor
from autotune.prediction.timeline import timeline
from autotune.report.charts.chart import COLOURS, INK, PAPER, PICTURED, Spec, category, coloured, number
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.solver.splits import layer_counts
from benchmarks.cases.solver import INTERN_LM2_7B, INTERN_VIT_300M, Case, lengths
from benchmarks.output.chart import write_svg
from benchmarks.packing import WEIGHTS
from trials.data.epoch import EpochSettings, build_epoch
from trials.plan import Layout, Packed, Packing, Padded, Plan
from trials.stage import Stage

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
_WORK, _LOST, _WAITING = COLOURS["forward"], COLOURS["backward"], COLOURS["waiting"]


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
    spec = {"data": _draw_data, "model": _draw_model, "memory": _draw_memory}[figure](shown)
    config = {"title": {"anchor": "start", "fontWeight": "normal"}, "axisX": {"labelAngle": 0}}
    write_svg(path, {**spec, "config": config}, shown)


def _draw_data(shown: dict[str, Any]) -> Spec:
    colours = {"work of the samples": _WORK, "padding": _LOST, "waiting for slower ranks": _WAITING}
    views = []
    for name, side in shown.items():
        own, computed = np.array(side["samples"]), np.add(side["samples"], side["padding"])
        bars = dict(zip(colours, (own, side["padding"], side["step"] - computed), strict=True))
        share = {"scale": {"domain": [0, 1.05], "nice": False}, "axis": {"format": "%", "tickCount": 6}}
        view = _bars(bars, colours, category("place", title="data rank"), number("value", None, **share))
        views.append({"title": f"{name}: step of {side['step']:.0%}", "width": 270, "height": 190, "layer": [view]})
    return {"hconcat": views}


def _draw_model(shown: dict[str, Any]) -> Spec:
    colours = {"forward": _WORK, "backward": _LOST, "reduction and optimizer": _WAITING}
    longest = max(side["milliseconds"] for side in shown.values())
    views: list[Spec] = []
    for name, side in shown.items():
        stages = [f"stage {number}: {held}" for number, held in enumerate(side["split"])]
        # [passes, stages, 2] each
        passes = dict(zip(colours, (side["forward"], side["backward"], [side["update"]]), strict=True))
        rows = [
            {"stage": stage, "pass": kind, "begin": begins, "end": ends}
            for kind, found in passes.items()
            for of_stages in found
            for stage, (begins, ends) in zip(stages, of_stages, strict=True)
        ]
        encoding = {
            "y": category("stage", order=stages),
            "x": number("begin", "milliseconds" if views else None, scale={"domain": [0, longest], "nice": False}),
            "x2": {"field": "end"},
            "color": coloured("pass", colours, PICTURED),
        }
        mark = {"type": "bar", "stroke": PAPER, "strokeWidth": 0.5}
        title = f"{name}: {side['milliseconds'] / 1e3:.2f} s, idle {side['idle']:.0%}"
        data = {"values": rows}
        views.append({"title": title, "data": data, "width": 560, "height": 100, "mark": mark, "encoding": encoding})
    return {"vconcat": views}


def _draw_memory(shown: dict[str, Any]) -> Spec:
    colours = {"weights, gradients, optimizer": _WORK, "kept for backward passes": _LOST, "limit": INK}
    most = max(shown["limit"], *(max(side["peak"]) for side in shown["plans"].values()))
    views: list[Spec] = []
    for name, side in shown["plans"].items():
        bars = dict(zip(colours, (side["static"], np.subtract(side["peak"], side["static"])), strict=False))
        names = {"labelExpr": f"[datum.value, {side['recomputed']}[datum.value]]"}
        x = category("place", title="stage, recomputed layers", axis=names)
        scale = {"domain": [0, 1.05 * most], "nice": False}
        y = number("value", None if views else "GiB", scale=scale, axis={"tickCount": 5})
        line: Spec = {
            "data": {"values": [{"part": "limit", "value": shown["limit"]}]},
            "mark": {"type": "rule", "strokeDash": [5, 3]},
            "encoding": {"y": y, "color": coloured("part", colours, PICTURED)},
        }
        title = [name, f"step of {side['milliseconds'] / 1e3:.2f} s"]
        views.append({"title": title, "width": 170, "height": 170, "layer": [_bars(bars, colours, x, y), line]})
    return {"hconcat": views}


def _bars(parts: dict[str, Any], colours: dict[str, str], x: Spec, y: Spec) -> Spec:
    """Draw bars of stacked parts, side by side."""
    rows = [
        {"part": part, "place": place, "value": float(value), "order": order}
        for order, (part, values) in enumerate(parts.items())
        for place, value in enumerate(values)
    ]
    encoding = {"x": x, "y": y, "order": {"field": "order"}, "color": coloured("part", colours, PICTURED)}
    return {"data": {"values": rows}, "mark": "bar", "encoding": encoding}


if __name__ == "__main__":
    for name in FIGURES:
        draw(name, IMAGES / f"imbalance-{name}.svg")
