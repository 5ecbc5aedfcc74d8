"""Predictions beside real runs of varied plans on two ranks. Prints one JSON object.

    python -m benchmarks.prediction [--plans 32] [--samples 400] [--seed 0] [--minutes 7]

On the model of examples/tiny-internvl: profiles its layers, draws plans at random (pipeline and data parallelism,
splits, recomputation, packers, capacities), and runs each on two warm ranks as a search does. Times and peak bytes are
compared with the prediction from the profile alone, and, of those behind the first ten, with one that those ten have
calibrated.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.job_file import load_job
from autotune.predict.costs import LayerCosts
from autotune.predict.predictor import MOST_BATCH_DEVIATION, Predictor
from autotune.search.calibrated import CalibratedPredictor, peaks
from autotune.search.profiling import profile_layers
from autotune.search.runner import Runner
from autotune.workload import Prepared, prepare
from benchmarks.result import Check, at_least, at_most, finish
from trials import wire
from trials.outcome import Completed, Measurement
from trials.plan import Layout, Packed, Packing, Padded, Plan, Stage, ZeroStage
from trials.run.pool import WarmPool
from trials.run.ranks import local_ranks

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-internvl"
CALIBRATING = 10
LEAST_PLANS = 30
NEARLY = 1.05
"""Plans expected to need up to this share of the limit are run: some of them run out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A plan that was run."""

    plan: Plan
    measurement: Measurement | None
    """None when it ran out of memory."""
    outcome: str
    fits: bool
    """Whether it was predicted to, with the upper end of its interval."""

    def row(self, **predicted: float) -> dict[str, Any]:
        seconds = None if self.measurement is None else sum(self.measurement.step_seconds) / len(self.measurement.steps)
        return {"plan": wire.to_document(self.plan), "outcome": self.outcome, "measured_seconds": seconds, **predicted}


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        prepared = _prepared(Path(folder), arguments.samples)
        with WarmPool(local_ranks(2, "cpu"), Path(folder) / "ranks") as pool:
            costs = profile_layers(prepared, pool, Path(folder) / "ranks")
            predictor = Predictor(costs, prepared.epoch, prepared.workload.model.element_bytes)
            runs = list(_run_all(prepared, predictor, pool, arguments))
    _report(costs, predictor, runs, prepared.job.search.warmup_steps)


def _prepared(folder: Path, samples: int) -> Prepared:
    generate = [sys.executable, str(EXAMPLE / "generate.py"), "--folder", str(folder), "--samples", str(samples)]
    subprocess.run(generate, check=True, stdout=sys.stderr)
    (folder / "job.yaml").write_text((EXAMPLE / "job.yaml").read_text())
    return prepare(load_job(folder / "job.yaml"), folder / "work")


# --- plans ---


def _run_all(prepared: Prepared, predictor: Predictor, pool: WarmPool, arguments: argparse.Namespace) -> Iterator[Run]:
    chance = random.Random(arguments.seed)
    deadline = time.monotonic() + 60 * arguments.minutes
    runner, uncalibrated = Runner(prepared, CalibratedPredictor(predictor), pool), CalibratedPredictor(predictor)
    seen: set[str] = set()
    while len(seen) < arguments.plans and time.monotonic() < deadline:
        plan = _drawn(prepared, chance, data=2 if len(seen) % 3 == 2 else 1)
        prediction = uncalibrated.predict(plan)
        limit = prepared.workload.memory_limit_bytes
        is_worth = max(prediction.stage_bytes) <= NEARLY * limit and prediction.batch_deviation <= MOST_BATCH_DEVIATION
        if plan.id in seen or not is_worth:
            continue
        seen.add(plan.id)
        outcome = runner.run(plan).outcome
        measurement = outcome.measurement if isinstance(outcome, Completed) else None
        fits = max(stage.high for stage in prediction.stage_memory) <= limit
        _tell(f"plan {len(seen)} of {arguments.plans}: {outcome.kind}")
        yield Run(plan=plan, measurement=measurement, outcome=outcome.kind, fits=fits)


def _drawn(prepared: Prepared, chance: random.Random, data: int) -> Plan:
    model = prepared.workload.model
    zero: ZeroStage = chance.choice((0, 1)) if data > 1 else 0
    layout = Layout(pipeline=2 // data, data=data, zero=zero)
    ends = (model.vision_layers + chance.randint(-5, 2), model.vision_layers + model.language_layers)
    cuts = [(0, ends[0]), ends] if data == 1 else [(0, ends[1])]
    stages = tuple(_stage(model.vision_layers, start, end, chance) for start, end in cuts)
    return Plan(packing=_packing(prepared, chance), layout=layout, stages=stages)


def _stage(vision_layers: int, start: int, end: int, chance: random.Random) -> Stage:
    vision = min(end, vision_layers) - min(start, vision_layers)
    language = end - start - vision
    share = chance.choice((0.0, 0.0, 0.5, 1.0))
    return Stage(
        vision=vision,
        language=language,
        recompute_vision=round(share * chance.random() * vision) if share < 1 else vision,
        recompute_language=round(share * chance.random() * language) if share < 1 else language,
    )


def _packing(prepared: Prepared, chance: random.Random) -> Packing:
    if chance.random() < 1 / 6:
        return Padded(samples=chance.choice((1, 2, 4)))
    data, samples = prepared.workload.data, chance.uniform(1.5, 6)
    qv = max(data.most_vision_units, round(samples * data.vision_units / data.samples))
    qt = max(data.longest_text_tokens, 16 * round(samples * data.text_tokens / data.samples / 16))
    packer = chance.choice(("isf", "best-fit", "cutting-stock"))
    return Packed(qv=qv, qt=qt, qv_min=qv, qt_min=max(1, qt - 128), packer=packer)


# --- what came of them ---


def _report(costs: LayerCosts, predictor: Predictor, runs: list[Run], warmup: int) -> None:
    done = [(run, run.measurement) for run in runs if run.measurement is not None]
    calibrated = CalibratedPredictor(predictor)
    for run, measurement in done[:CALIBRATING]:
        calibrated.observe(run.plan, measurement, warmup)
    alone = [_compared(CalibratedPredictor(predictor), run.plan, measurement, warmup) for run, measurement in done]
    later = [_compared(calibrated, run.plan, measurement, warmup) for run, measurement in done[CALIBRATING:]]
    rows: list[Mapping[str, Any]] = [{"costs": wire.to_document(costs), "noisy": list(costs.noisy_kinds)}]
    rows += [run.row(**compared) for (run, _), compared in zip(done, alone, strict=True)]
    rows += [{"calibrated": compared["plan_id"], **compared} for compared in later]
    rows += [run.row(fits=run.fits) for run in runs if run.measurement is None]
    checks = [
        at_least("plans that were run", [len(done)], LEAST_PLANS),
        *_time_checks("profile alone", alone, 0.05, 0.15),
        *_time_checks("ten trials", later, 0.03, 0.08),
        *_byte_checks(alone),
        at_most("plans predicted to fit that did not", [sum(r.fits and r.outcome == "failed" for r in runs)], 0),
    ]
    finish(rows, checks)


def _compared(predictor: CalibratedPredictor, plan: Plan, measurement: Measurement, warmup: int) -> dict[str, Any]:
    predicted = predictor.predict(plan).step_seconds[list(measurement.steps)].mean()
    measured = sum(measurement.step_seconds) / len(measurement.steps)
    found = peaks(predictor.base, plan, measurement, warmup)
    return {
        "plan_id": plan.id,
        "predicted_seconds": float(predicted),
        "step_seconds": measured,
        "relative_error": float(predicted / measured - 1),
        "predicted_relative_error": predictor.relative_error(plan),
        "byte_errors": [peak.predicted.expected / peak.measured - 1 for peak in found],
        "measured_bytes": [peak.measured for peak in found],
        "stages": [wire.to_document(stage) for stage in measurement.stages],
    }


def _time_checks(name: str, compared: list[dict[str, Any]], median: float, tail: float) -> list[Check]:
    errors = [abs(each["relative_error"]) for each in compared]
    pairs = [(each["predicted_seconds"], each["step_seconds"]) for each in compared]
    return [
        at_most(f"median error of the step time, {name}", [float(np.median(errors))] if errors else [], median),
        at_most(f"90th percentile, {name}", [float(np.quantile(errors, 0.9))] if errors else [], tail),
        at_least(f"Kendall's tau, {name}", [kendall(pairs)] if len(pairs) > 1 else [], 0.9),
    ]


def _byte_checks(compared: list[dict[str, Any]]) -> list[Check]:
    errors = [abs(error) for each in compared for error in each["byte_errors"]]
    return [at_most("median error of the peak bytes", [float(np.median(errors))] if errors else [], 0.02)]


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Of all pairs of plans, the share that both rank alike less the share that they do not."""
    predicted, measured = np.array(pairs).T
    agree = np.sign(predicted[:, None] - predicted) * np.sign(measured[:, None] - measured)
    return float(agree[np.triu_indices(len(pairs), 1)].mean())


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=32, help="how many to run")
    parser.add_argument("--samples", type=int, default=400, help="of the example's data")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn plans")
    parser.add_argument("--minutes", type=float, default=7.0, help="no plan is begun after so many")
    return parser.parse_args()


if __name__ == "__main__":
    main()
