"""What a machine with GPUs has to show: parity, predictions, a tuning, a training, a large model's layers.

    python -m benchmarks.gpu [--minutes 30] [--pretend]

Needs no network. Prints one JSON object, and replaces docs/benchmarks/gpu.md by a page with the devices' name. With
`--pretend` the same code runs from start to end on CPU ranks and tiny models, and nothing is written: its numbers say
nothing about a GPU, and nothing is offloaded. What does not begin before `--minutes` have passed is left out, and the
benchmark fails.

- parity: gradients of a step compared with transformers' own model, in float32 and in bfloat16, on one device, of
  several families, with layers that keep everything and with layers that offload it;
- kernels: attention, patch embedding and head, compared with the usual way to compute them: errors and times;
- predictions: predicted and measured seconds of a step and peak bytes, and model FLOP utilisation, for one device
  and for all of them, of plans that recompute nothing, recompute all layers, offload them, or are drawn at random;
- tuning: a search and a training with its plan, for one device and for all;
- rivals: tuned trainings on one device next to a plain packed loop, of models like InternVL3-2B and Qwen2.5-VL-3B;
- large: one layer of each kind of InternViT-6B with InternLM2-20B is profiled on one device; the solver's plan for
  four stages, compared with OmniBal's boundaries 0, 23, 47, 72, 101 (93 layers of them in the chain here);
- compiled: a vision and a language layer as they are and compiled by torch, in bfloat16, on one device.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, TypeAlias

import numpy as np
import torch

from autotune import launch, tune
from autotune.certification.certify import certify
from autotune.prediction.predictor import Predictor
from autotune.search.execution.profiling import profile_layers
from autotune.search.execution.runner import Runner
from autotune.search.learning.calibrated import CalibratedPredictor, peaks
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.workload import Prepared
from benchmarks.cases import compiled as compiled_layers
from benchmarks.cases.layouts import OMNIBAL_STAGES
from benchmarks.devices import kernels, page, rival
from benchmarks.devices.flops import flops_of_sample
from benchmarks.devices.jobs import job_of, prepared_of
from benchmarks.devices.models import make_example, with_model
from benchmarks.devices.target import Target, pretended_target, real_target
from benchmarks.output.result import Check, at_least, at_most, finish, show
from trials import plugins
from trials.launchers.local import LocalLauncher
from trials.outcome import Completed, Failed, Measurement
from trials.plan import Layout, Offload, Packed, Plan, ZeroStage
from trials.run.pool import WarmPool
from trials.sites.local import LocalSite
from trials.stage import Stage

Row: TypeAlias = dict[str, Any]
PARTS = ("parity", "kernels", "predictions", "tuning", "large", "compiled", "rivals")
_TINY: plugins.Plugins[Any] = plugins.Plugins("tests.tiny_models")
STEP_ERROR, BYTE_ERROR = 0.05, 0.05
_TYPES = ("float32", "bfloat16")
_COMPARED_SAMPLES = 8
"""Samples of a compared step: transformers' own model runs each by itself, in float32."""
REPEATS = 15
"""Of a compiled layer."""
STAGES = 4


def main() -> None:
    arguments = _arguments()
    target = pretended_target() if arguments.pretend else real_target()
    ends = time.monotonic() + 60 * arguments.minutes
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {"XDG_DATA_HOME": f"{folder}/data-home", "XDG_CACHE_HOME": f"{folder}/cache-home"}
        example = make_example(folder / "example", target.samples)
        for part in arguments.part or PARTS:
            if time.monotonic() > ends:
                print(f"{part}: left out, after {arguments.minutes} minutes", file=sys.stderr)
                continue
            began = time.monotonic()
            for row in _RUNS[part](target, example):
                rows.append({"part": part, **row})
                show(rows[-1])
            show(f"{part}: {time.monotonic() - began:.0f} s")
    checks = checks_of(rows)
    if not target.pretended and not arguments.part:
        page.write(target, rows, checks)
    finish(
        [{"part": "device", "name": target.name, "devices": target.devices, "pretended": target.pretended}, *rows],
        checks,
    )


def checks_of(rows: list[Row]) -> list[Check]:
    """Return the checks; a part that did not run holds none of its bars."""

    def values(key: str) -> list[float]:
        return [row[key] for row in rows if row.get(key) is not None]

    of_devices: dict[int, list[float]] = {}
    for row in rows:
        if row.get("calibrated_error") is not None:
            of_devices.setdefault(row["devices"], []).append(row["calibrated_error"])
    later = [float(np.median(errors[len(errors) // 2 :])) for errors in of_devices.values()]
    ratios = {limited: [row["over_loop"] for row in rows if row.get("limited") is limited] for limited in (False, True)}
    return [
        at_least("parity: certificates that hold", values("holds"), 1.0),
        at_most("relative error of a kernel", [most for row in rows for most in row.get("error", {}).values()], 1e-2),
        at_most("plans that failed", values("failed"), 0.0),
        at_most("relative error of the step predicted after half of the plans, median", later, STEP_ERROR),
        at_most("relative error of the predicted peak bytes", values("byte_error"), BYTE_ERROR),
        at_least("steps of the trainings", values("steps"), 1.0),
        at_least("training over the plain packed loop, without a memory limit", ratios[False], 1.0),
        at_least("training over the plain packed loop, with a memory limit", ratios[True], 1.05),
        at_least("step of OmniBal's boundaries / of the solver's", values("gain"), 1.0),
        at_most("graphs of layers that are compiled after the warm-up", values("later_graphs"), 0.0),
        at_least("parts that ran", [len({row["part"] for row in rows})], len(PARTS)),
    ]


def parity(target: Target, example: Path) -> Iterator[Row]:
    target = replace(target, batch=_COMPARED_SAMPLES)
    models = {"example": with_model(example, target.trained, "parity")}
    for family in target.families:
        models[family] = example / family
        with redirect_stdout(sys.stderr):  # stdout is for the result alone
            plugins.load(_TINY, family).make(models[family])
    cases: list[tuple[str, str, Offload]] = [(name, dtype, "none") for name in models for dtype in _TYPES]
    cases += [("example", "bfloat16", offload) for offload in target.offloads if offload != "none"]
    for name, dtype, offload in cases:
        prepared = prepared_of(example, models[name], target, 1, dtype)
        folder = example / f"certificates-{name}-{dtype}-{offload}"
        plan = whole(prepared, frees=offload != "none", offload=offload)
        certificate = certify(prepared, plan, folder, LocalSite(target.accelerator))
        yield {
            "model": name,
            "dtype": dtype,
            "offload": offload,
            "holds": float(certificate.holds),
            "reasons": list(certificate.reasons),
        }


def predictions(target: Target, example: Path) -> Iterator[Row]:
    model = with_model(example, target.trained, "predicted")
    for devices in target.device_counts:
        prepared = prepared_of(example, model, target, devices, "bfloat16")
        logs = example / f"predictions-{devices}"
        with WarmPool(LocalLauncher(logs, devices, target.accelerator)) as pool:
            predictor = profiled(prepared, pool, logs)
            calibrated = CalibratedPredictor(predictor)
            runner = Runner(prepared, calibrated, pool)
            for plan in plans(target, prepared, predictor, devices):
                outcome = runner.run(plan).outcome
                found = outcome.measurement if isinstance(outcome, Completed) else None
                failed = float(isinstance(outcome, Failed))
                yield {"failed": failed, **_predicted(target, prepared, calibrated, plan, found)}
                if found:
                    calibrated.observe(plan, found, prepared.job.search.warmup_steps)


def profiled(prepared: Prepared, pool: WarmPool, logs: Path) -> Predictor:
    """Return a predictor from a profile of the layers. Packs that other processes load are ready in time."""
    costs = profile_layers(prepared, pool, logs).with_workers(prepared.job.data.workers or 0)
    return Predictor(costs, prepared.epoch, prepared.workload.model.element_bytes)


def _predicted(
    target: Target, prepared: Prepared, calibrated: CalibratedPredictor, plan: Plan, found: Measurement | None
) -> Row:
    """Return a plan's predictions, from the profile alone and from the runs before it as well, and its run."""
    row: Row = {"devices": plan.layout.world_size, "plan": str(plan), "completed": int(found is not None)}
    if found is None:
        return row
    measured, steps = float(np.mean(found.step_seconds)), list(found.steps)
    alone, corrected = (
        float(each.predict(plan).step_seconds[steps].mean()) / measured - 1 for each in (calibrated.base, calibrated)
    )
    # Of the steps that ran: heavier packs of the epoch may not be among them.
    errors = [
        abs(peak.predicted.expected / peak.measured - 1)
        for peak in peaks(calibrated.base, plan, found, prepared.job.search.warmup_steps)
    ]
    achieved = found.measured_samples_per_second * flops_of_sample(prepared) / plan.layout.world_size
    return row | {
        "step_seconds": measured,
        "step_error": abs(alone),
        "calibrated_error": abs(corrected),
        "peak_bytes": found.peak_bytes,
        "byte_error": max(errors),
        "measured_samples_per_second": found.measured_samples_per_second,
        "flop_utilisation": achieved / target.peak_flops if target.peak_flops else None,
    }


def whole(prepared: Prepared, *, frees: bool = False, offload: Offload = "none", devices: int = 1) -> Plan:
    """Return a plan with all layers on each of the data ranks, with packs of about two mean samples.

    Where it `frees` memory, all layers are recomputed or offload.
    """
    work = prepared.workload
    vision, language = work.model.vision_layers, work.model.language_layers
    stage = Stage(
        vision=vision,
        language=language,
        recompute_vision=vision * frees,
        recompute_language=language * frees,
    )
    # bfloat16 weights need ZeRO 1.
    zero: ZeroStage = 0 if work.model.element_bytes == 4 and devices == 1 else 1
    layout = Layout(pipeline=1, data=devices, zero=zero, offload=offload)
    return Plan(packing=packing(prepared), layout=layout, stages=(stage,))


def packing(prepared: Prepared, samples: float = 2.0) -> Packed:
    """Return packs with room for about this number of samples of mean size."""
    index = prepared.index
    qv, qt = (
        max(int(np.ceil(samples * column.mean())), int(column.max()))
        for column in (index.vision_units, index.text_tokens)
    )
    return Packed(qv=qv, qt=qt, qv_min=qv, qt_min=qt)


def plans(target: Target, prepared: Prepared, predictor: Predictor, devices: int) -> Iterator[Plan]:
    """Yield plans that keep, recompute and offload, and others; on several devices also one with the solver's split."""
    yield whole(prepared, devices=devices)
    for offload in target.offloads:
        yield whole(prepared, frees=True, offload=offload, devices=devices)
    if devices > 1:
        layout = Layout(pipeline=devices, data=1, zero=1)
        plan = solver(prepared, predictor).solve(packing(prepared), layout)
        if plan is not None:
            yield plan
    yield from drawn(target, prepared, predictor, devices)


def drawn(target: Target, prepared: Prepared, predictor: Predictor, devices: int) -> Iterator[Plan]:
    """Yield plans with packs and recomputation drawn at random that keep the global batch."""
    chance, plain, left = Random(0), whole(prepared, devices=devices), target.drawn_plans
    (stage,) = plain.stages
    while left:
        times = chance.uniform(1.0, 8.0)
        packed = packing(prepared, times)
        vision, language = (
            round(chance.choice((0.0, chance.random(), 1.0)) * count) for count in (stage.vision, stage.language)
        )
        recomputing = replace(stage, recompute_vision=vision, recompute_language=language)
        plan = replace(plain, packing=packed, stages=(recomputing,))
        if predictor.predict(plan).keeps_batch:
            left -= 1
            yield plan


def solver(prepared: Prepared, predictor: Predictor) -> Solver:
    model = prepared.workload.model
    limits = Limits(
        vision_layers=model.vision_layers,
        language_layers=model.language_layers,
        memory_limit_bytes=prepared.workload.memory_limit_bytes,
    )
    return Solver(predictor, limits)


def tuning(target: Target, example: Path) -> Iterator[Row]:
    model = with_model(example, target.trained, "tuned")
    for devices in target.device_counts:
        job = job_of(example, model, target, devices, "bfloat16")
        database = f"sqlite:///{example}/tuning-{devices}.db"
        best = tune(job, database=database)
        launched = launch(job, database=database)
        yield {
            "devices": devices,
            "plan": str(best.plan),
            "gains": {baseline.role: baseline.gain for baseline in best.baselines},
            "steps": launched.steps,
            "training_samples_per_second": launched.training_samples_per_second,
            "data_wait_share": launched.data_wait_share,
        }


def large(target: Target, example: Path) -> Iterator[Row]:
    prepared = prepared_of(example, with_model(example, target.large, "large"), target, 1, "bfloat16")
    logs = example / "large-logs"
    with WarmPool(LocalLauncher(logs, 1, target.accelerator)) as pool:
        predictor = profiled(prepared, pool, logs)
    # The split is compared, not what fits into one device's memory.
    ample, layout = solver(prepared, predictor).ample, Layout(pipeline=STAGES, data=1, zero=1)
    packs = packing(prepared)
    ours, theirs = ample.solve(packs, layout), ample.fit(packs, layout, OMNIBAL_STAGES)
    assert ours is not None
    assert theirs is not None
    seconds = {name: predictor.epoch_seconds(plan) for name, plan in (("solver", ours), ("omnibal", theirs))}
    yield {
        "layers": {
            kind: {"forward_seconds": list(cost.forward_seconds), "backward_seconds": list(cost.backward_seconds)}
            for kind, cost in predictor.costs.layers
        },
        "boundaries": np.cumsum([stage.vision + stage.language for stage in ours.stages]).tolist(),
        "omnibal_boundaries": list(OMNIBAL_STAGES),
        "epoch_seconds": seconds,
        "gain": seconds["omnibal"] / seconds["solver"],
    }


def compiled(target: Target, example: Path) -> Iterator[Row]:
    model = with_model(example, target.trained, "compiled")
    return compiled_layers.rows(model, "bfloat16", torch.device(target.accelerator), target.compiled, REPEATS)


def kernel(target: Target, _: Path) -> Iterator[Row]:
    return kernels.rows(torch.device(target.accelerator), target.kernels)


def rivals(target: Target, example: Path) -> Iterator[Row]:
    return rival.rows(target, example / "rivals")


_RUNS: dict[str, Callable[[Target, Path], Iterator[Row]]] = {
    "parity": parity,
    "kernels": kernel,
    "predictions": predictions,
    "tuning": tuning,
    "large": large,
    "compiled": compiled,
    "rivals": rivals,
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no further part begins")
    parser.add_argument("--part", action="append", choices=PARTS, help="run this part alone; may be repeated")
    parser.add_argument("--pretend", action="store_true", help="run on the CPU, with tiny sizes; write nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
