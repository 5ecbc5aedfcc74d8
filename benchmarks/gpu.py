"""What a machine with GPUs has to show: parity, predictions, a tuning, a training, a large model's layers.

    python -m benchmarks.gpu [--minutes 30] [--pretend]

Needs no network. Prints one JSON object, and replaces docs/benchmarks/gpu.md by a page with the devices' name. With
`--pretend` the same code runs from start to end on CPU ranks and tiny models, and nothing is written: its numbers say
nothing about a GPU, and nothing is offloaded. What does not begin before `--minutes` have passed is left out, and the
benchmark fails.

- parity: gradients of a step compared with transformers' own model, in float32 and in bfloat16, on one device, with
  layers that keep everything and with layers that offload it;
- predictions: predicted and measured seconds of a step and peak bytes, and model FLOP utilisation, for one device
  and for all of them, of plans that recompute nothing, recompute all layers, and offload them;
- tuning: a search and a training with its plan, for one device and for all;
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
from pathlib import Path
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
from benchmarks.devices import page
from benchmarks.devices.jobs import job_of, make_example, prepared_of, with_model
from benchmarks.devices.target import Target, pretended_target, real_target
from benchmarks.output.result import Check, at_least, at_most, finish, show
from trials.launchers.local import LocalLauncher
from trials.outcome import Completed, Measurement
from trials.plan import Layout, Offload, Packed, Plan, Stage, ZeroStage
from trials.run.pool import WarmPool
from trials.sites.local import LocalSite

Row: TypeAlias = dict[str, Any]
PARTS = ("parity", "predictions", "tuning", "large", "compiled")
STEP_ERROR, BYTE_ERROR = 0.10, 0.05
REPEATS = 15
"""Of a compiled layer."""
STAGES = 4
_PASSES = 3
"""Forward, and a backward pass of twice its operations; recomputation is no useful work."""


def main() -> None:
    arguments = _arguments()
    target = pretended_target() if arguments.pretend else real_target()
    ends = time.monotonic() + 60 * arguments.minutes
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {"XDG_DATA_HOME": f"{folder}/data-home", "XDG_CACHE_HOME": f"{folder}/cache-home"}
        example = make_example(folder / "example", target)
        for part in PARTS:
            if time.monotonic() > ends:
                print(f"{part}: left out, after {arguments.minutes} minutes", file=sys.stderr)
                continue
            began = time.monotonic()
            rows += [{"part": part, **row} for row in _RUNS[part](target, example)]
            show(f"{part}: {time.monotonic() - began:.0f} s")
    checks = checks_of(rows)
    if not target.pretended:
        page.write(target, rows, checks)
    finish(
        [{"part": "device", "name": target.name, "devices": target.devices, "pretended": target.pretended}, *rows],
        checks,
    )


def checks_of(rows: list[Row]) -> list[Check]:
    """Return the checks; a part that did not run holds none of its bars."""

    def values(key: str) -> list[float]:
        return [row[key] for row in rows if row.get(key) is not None]

    return [
        at_least("parity: certificates that hold", values("holds"), 1.0),
        at_most("relative error of the predicted step", values("step_error"), STEP_ERROR),
        at_most("relative error of the predicted peak bytes", values("byte_error"), BYTE_ERROR),
        at_least("steps of the trainings", values("steps"), 1.0),
        at_least("step of OmniBal's boundaries / of the solver's", values("gain"), 1.0),
        at_most("graphs of layers that are compiled after the warm-up", values("later_graphs"), 0.0),
        at_least("parts that ran", [len({row["part"] for row in rows})], len(PARTS)),
    ]


def parity(target: Target, example: Path) -> Iterator[Row]:
    model = with_model(example, target.trained, "parity")
    for dtype in ("float32", "bfloat16"):
        prepared = prepared_of(example, model, target, 1, dtype)
        for offload in target.offloads:
            folder = example / f"certificates-{dtype}-{offload}"
            plan = whole(prepared, frees=offload != "none", offload=offload)
            certificate = certify(prepared, plan, folder, LocalSite(target.accelerator))
            yield {
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
            predictor = Predictor(
                profile_layers(prepared, pool, logs), prepared.epoch, prepared.workload.model.element_bytes
            )
            runner = Runner(prepared, CalibratedPredictor(predictor), pool)
            for plan in plans(target, prepared, predictor, devices):
                found = [runner.run(plan).outcome for _ in range(target.rounds)]
                measured = [each.measurement for each in found if isinstance(each, Completed)]
                yield _predicted(target, prepared, predictor, plan, measured)


def _predicted(
    target: Target, prepared: Prepared, predictor: Predictor, plan: Plan, measured: list[Measurement]
) -> Row:
    """Return a plan's prediction and its runs; errors are None where none was completed."""
    predicted = predictor.predict(plan)
    row: Row = {"devices": plan.layout.world_size, "plan": str(plan), "completed": len(measured)}
    if not measured:
        return row
    timed = [predicted.step_seconds[list(run.steps)].mean() for run in measured]
    ratios = [float(mean / np.mean(run.step_seconds)) for mean, run in zip(timed, measured, strict=True)]
    warmup = prepared.job.search.warmup_steps
    # Of the steps that ran: heavier packs of the epoch may not be among them.
    errors = [
        abs(peak.predicted.expected / peak.measured - 1)
        for run in measured
        for peak in peaks(predictor, plan, run, warmup)
    ]
    rate = float(np.median([run.measured_samples_per_second for run in measured]))
    achieved = rate * flops_of_sample(prepared) / plan.layout.world_size
    return row | {
        "step_seconds": float(np.median([np.mean(run.step_seconds) for run in measured])),
        "step_error": abs(float(np.median(ratios)) - 1),
        "peak_bytes": max(run.peak_bytes for run in measured),
        "byte_error": max(errors),
        "measured_samples_per_second": rate,
        "flop_utilisation": achieved / target.peak_flops if target.peak_flops else None,
    }


def flops_of_sample(prepared: Prepared) -> float:
    """Return the operations of a training step for a mean sample, without what is recomputed."""
    shape, index = prepared.workload.model, prepared.index
    units, tokens = index.vision_units.astype(np.float64), index.text_tokens.astype(np.float64)
    forward = shape.unit_flops * units + shape.token_flops * tokens + shape.square_flops * tokens**2
    forward += shape.target_flops * index.target_tokens
    return _PASSES * float(forward.mean())


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


def packing(prepared: Prepared) -> Packed:
    index = prepared.index
    qv = max(2 * int(np.ceil(index.vision_units.mean())), int(index.vision_units.max()))
    qt = max(2 * int(np.ceil(index.text_tokens.mean())), int(index.text_tokens.max()))
    return Packed(qv=qv, qt=qt, qv_min=qv, qt_min=qt)


def plans(target: Target, prepared: Prepared, predictor: Predictor, devices: int) -> Iterator[Plan]:
    """Yield plans that keep, recompute and offload; on several devices also a pipeline with the solver's split."""
    yield whole(prepared, devices=devices)
    for offload in target.offloads:
        yield whole(prepared, frees=True, offload=offload, devices=devices)
    if devices > 1:
        layout = Layout(pipeline=devices, data=1, zero=1)
        plan = solver(prepared, predictor).solve(packing(prepared), layout)
        if plan is not None:
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
        costs = profile_layers(prepared, pool, logs)
    predictor = Predictor(costs, prepared.epoch, prepared.workload.model.element_bytes)
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
            for kind, cost in costs.layers
        },
        "boundaries": np.cumsum([stage.vision + stage.language for stage in ours.stages]).tolist(),
        "omnibal_boundaries": list(OMNIBAL_STAGES),
        "epoch_seconds": seconds,
        "gain": seconds["omnibal"] / seconds["solver"],
    }


def compiled(target: Target, example: Path) -> Iterator[Row]:
    model = with_model(example, target.trained, "compiled")
    return compiled_layers.rows(model, "bfloat16", torch.device(target.accelerator), target.compiled, REPEATS)


_RUNS: dict[str, Callable[[Target, Path], Iterator[Row]]] = {
    "parity": parity,
    "predictions": predictions,
    "tuning": tuning,
    "large": large,
    "compiled": compiled,
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="after which no further part begins")
    parser.add_argument("--pretend", action="store_true", help="run on the CPU, with tiny sizes; write nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
