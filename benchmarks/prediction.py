"""Predictions compared with real runs of varied plans on two ranks. Prints one JSON object.

    python -m benchmarks.prediction [--plans 32] [--rounds 7] [--samples 400] [--seed 0]

On the model of examples/tiny-internvl: profiles its layers, draws plans at random (pipeline and data parallelism, ZeRO
0 to 3, any split, recomputation, packers, capacities), and runs each on two warm ranks as a search does, with the
upper end of its own predicted memory as the limit. Before and after each run a few layers are timed again: a shared
machine drifts by more than what is to be measured, so each run is compared at the speed that these layers had in the
profile. All plans run once in each round, each in an order of its own; a plan's time is the median of its runs,
minutes apart. It is compared with the prediction from the profile alone, and, of the plans behind the first ten, with
one that the first runs of those ten have calibrated. The errors against the times as they were are printed as well,
and how far two rounds agree on the ranking: no prediction can be expected to agree better with them than they with
each other.
"""

import argparse
import math
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from autotune.job_file import load_job
from autotune.prediction.predictor import Predictor
from autotune.search.execution.runner import Runner
from autotune.search.learning.calibrated import CalibratedPredictor, peaks
from autotune.search.solver.splits import layer_counts
from autotune.workload import Prepared, prepare
from benchmarks.cases.drift import at_profiled_speed, slowness, timed_profile
from benchmarks.output.result import Check, at_least, at_most, finish, show
from trials import wire
from trials.arrays import Floats
from trials.costs.layer_costs import LayerCosts
from trials.launchers.local import LocalLauncher
from trials.outcome import Completed, Measurement, Outcome
from trials.plan import Layout, Packed, Packing, Padded, Plan, ZeroStage
from trials.run.pool import WarmPool
from trials.stage import Stage

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-internvl"
CALIBRATING = 10
LEAST_PLANS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A plan that was run, once in each round."""

    plan: Plan
    outcomes: tuple[Outcome, ...]
    slowness: tuple[float, ...]
    """Of the machine during each of them, in units of the time that layers took in the profile."""

    @property
    def completed(self) -> bool:
        return all(isinstance(outcome, Completed) for outcome in self.outcomes)

    def measurements(self, *, drifting: bool = False) -> list[Measurement]:
        """Return the measurements at the speed of the profile, or as they were."""
        found = [outcome.measurement for outcome in self.outcomes if isinstance(outcome, Completed)]
        return found if drifting else list(map(at_profiled_speed, found, self.slowness))

    def seconds(self, *, drifting: bool = False) -> list[float]:
        """Return the mean of a step in each round."""
        return [float(np.mean(measured.step_seconds)) for measured in self.measurements(drifting=drifting)]


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        prepared = example(Path(folder), arguments.samples)
        with WarmPool(LocalLauncher(Path(folder) / "ranks", 2, "cpu")) as pool:
            costs, then = timed_profile(prepared, pool, Path(folder) / "ranks")
            predictor = Predictor(costs, prepared.epoch, prepared.workload.model.element_bytes)
            plans = list(_plans(prepared, predictor, arguments))
            runner, machine = partial(_runner, prepared, predictor, pool), partial(slowness, prepared, pool, then)
            runs = _run_all(runner, machine, plans, arguments.rounds)
    _report(costs, predictor, runs, prepared.job.search.warmup_steps)


def example(folder: Path, samples: int, search: Mapping[str, object] | None = None, *, devices: int = 2) -> Prepared:
    """Return the example's job on `samples` samples, made in `folder`; `search` replaces some of its settings."""
    generate = [sys.executable, str(EXAMPLE / "generate.py"), "--folder", str(folder), "--samples", str(samples)]
    subprocess.run(generate, check=True, stdout=sys.stderr)
    (folder / "job.yaml").write_text((EXAMPLE / "job.yaml").read_text())
    job = load_job(folder / "job.yaml")
    settings = job.search.model_copy(update=search or {})
    hardware = job.hardware.model_copy(update={"devices": devices})
    return prepare(job.model_copy(update={"search": settings, "hardware": hardware}), folder / "work")


# --- plans ---


def _plans(prepared: Prepared, predictor: Predictor, arguments: argparse.Namespace) -> Iterator[Plan]:
    """Yield distinct plans that keep the global batch."""
    chance = random.Random(arguments.seed)
    seen: set[str] = set()
    while len(seen) < arguments.plans:
        plan = _drawn(prepared, chance, data=2 if len(seen) % 3 == 2 else 1)
        if plan.id not in seen and predictor.predict(plan).keeps_batch:
            seen.add(plan.id)
            yield plan


def _run_all(
    runner: Callable[[Plan], Runner], machine: Callable[[], float], plans: Sequence[Plan], rounds: int
) -> list[Run]:
    """Run the plans in rounds; `machine` returns how slow it is, compared with the profile."""
    outcomes: dict[Plan, list[Outcome]] = {plan: [] for plan in plans}
    of_runs: dict[Plan, list[float]] = {plan: [] for plan in plans}
    before = machine()
    for number in range(rounds):
        for plan in random.Random(number).sample(plans, len(plans)):
            outcomes[plan].append(runner(plan).run(plan).outcome)
            after = machine()
            of_runs[plan].append((before + after) / 2)
            show(f"round {number + 1}: {plan.id}, slowness {before:.3f}, then {after:.3f}")
            before = after
    return [Run(plan=plan, outcomes=tuple(outcomes[plan]), slowness=tuple(of_runs[plan])) for plan in plans]


def _runner(prepared: Prepared, predictor: Predictor, pool: WarmPool, plan: Plan) -> Runner:
    """Return a runner with no more memory than what the plan is predicted to need at the most."""
    uncalibrated = CalibratedPredictor(predictor)
    limit = math.ceil(max(stage.high for stage in uncalibrated.predict(plan).stage_memory))
    workload = replace(prepared.workload, memory_limit_bytes=limit)
    return Runner(replace(prepared, workload=workload), uncalibrated, pool)


def _drawn(prepared: Prepared, chance: random.Random, data: int) -> Plan:
    model = prepared.workload.model
    zero: ZeroStage = chance.choice((0, 1, 2, 3)) if data > 1 else 0
    layout = Layout(pipeline=2 // data, data=data, zero=zero)
    layers = model.vision_layers + model.language_layers
    end = chance.randint(1, layers - 1)
    boundaries = (end, layers) if data == 1 else (layers,)
    stages = tuple(_stage(*counts, chance) for counts in layer_counts(boundaries, model.vision_layers))
    return Plan(packing=_packing(prepared, chance), layout=layout, stages=stages)


def _stage(vision: int, language: int, chance: random.Random) -> Stage:
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
    done = [run for run in runs if run.completed]
    uncalibrated, calibrated = CalibratedPredictor(predictor), CalibratedPredictor(predictor)
    for run in done[:CALIBRATING]:
        calibrated.observe(run.plan, run.measurements()[0], warmup)
    alone = [_compared(uncalibrated, run, warmup) for run in done]
    later = [_compared(calibrated, run, warmup) for run in done[CALIBRATING:]]
    slow = [value for run in runs for value in run.slowness]
    rows: list[Mapping[str, Any]] = [
        {"costs": wire.to_document(costs), "noisy": list(costs.noisy_kinds)},
        {"slowness": {"least": min(slow), "median": float(np.median(slow)), "most": max(slow)}},
        {"tau_of_two_rounds": _tau_of_rounds(done)},
        *(_noise(done, alone, later, drifting=drifting) for drifting in (False, True)),
        *({"after": "profile", **compared} for compared in alone),
        *({"after": f"{CALIBRATING} trials", **compared} for compared in later),
        *({"plan": wire.to_document(run.plan), "outcomes": [outcome.kind for outcome in run.outcomes]} for run in runs),
    ]
    failed = [run for run in runs if run not in done]
    checks = [
        at_least("plans that were run", [len(done)], LEAST_PLANS),
        *_time_checks("profile alone", alone, 0.05, 0.15),
        *_time_checks("ten trials", later, 0.03, 0.08),
        *_byte_checks(alone),
        at_most("plans that needed more memory than predicted at the most", [len(failed)], 0),
    ]
    finish(rows, checks)


def _compared(predictor: CalibratedPredictor, run: Run, warmup: int) -> dict[str, Any]:
    measurement = run.measurements()[0]
    predicted = predictor.predict(run.plan).step_seconds[list(measurement.steps)].mean()
    measured = float(np.median(run.seconds()))
    found = peaks(predictor.base, run.plan, measurement, warmup)
    return {
        "plan_id": run.plan.id,
        "predicted_seconds": float(predicted),
        "step_seconds": measured,
        "of_each_run": run.seconds(),
        "drifting_seconds": float(np.median(run.seconds(drifting=True))),
        "relative_error": float(predicted / measured - 1),
        "predicted_relative_error": predictor.relative_error(run.plan),
        "byte_errors": [peak.predicted.expected / peak.measured - 1 for peak in found],
        "measured_bytes": [peak.measured for peak in found],
        "stages": [wire.to_document(stage) for stage in measurement.stages],
    }


def _noise(done: list[Run], *groups: list[dict[str, Any]], drifting: bool) -> dict[str, Any]:
    """Return how far a plan's runs are from their median, and the errors of the predictions against such times."""
    times = np.array([run.seconds(drifting=drifting) for run in done])
    seconds = "drifting_seconds" if drifting else "step_seconds"
    return {
        "times": "as they were" if drifting else "at the speed of the profile",
        "a_run_differs_from_the_median_by": _quantiles(np.abs(times / np.median(times, axis=1)[:, None] - 1).ravel()),
        "errors": [
            _quantiles([abs(each["predicted_seconds"] / each[seconds] - 1) for each in group]) for group in groups
        ],
    }


def _tau_of_rounds(done: list[Run]) -> list[float]:
    """Return Kendall's tau of the first round with the second, and so on."""
    times = list(zip(*(run.seconds() for run in done), strict=True))
    return [kendall(list(zip(*pair, strict=True))) for pair in combinations(times, 2)]


def _quantiles(values: Sequence[float] | Floats) -> dict[str, float]:
    return (
        {"median": float(np.median(values)), "90th percentile": float(np.quantile(values, 0.9))} if len(values) else {}
    )


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
    """Return the share of all pairs of plans that both rank alike, less the share that they do not."""
    predicted, measured = np.array(pairs).T
    agree = np.sign(predicted[:, None] - predicted) * np.sign(measured[:, None] - measured)
    return float(agree[np.triu_indices(len(pairs), 1)].mean())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=32, help="how many to run")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=400, help="of the example's data")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn plans")
    return parser.parse_args()


if __name__ == "__main__":
    main()
