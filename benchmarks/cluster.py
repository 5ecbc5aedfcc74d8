"""Layouts and predictions on two nodes, joined by a fast and by a slow link. Prints one JSON object.

    python -m benchmarks.cluster [--plans 12] [--rounds 2]

Each node has one rank; the other one is a network namespace of this machine, joined by a virtual cable. With each link
the layers and the exchanges of the model of examples/tiny-internvl are profiled over both nodes, and the search space
says which plan is predicted fastest. Then the plans that were chosen on both links, and further plans drawn at random
(pipeline and data parallelism, splits, recomputation, packs), run in rounds, each time on the same steps of all costs.
A plan's time is the median of its rounds. A choice is right if it is faster, on the link on which it was made, than the
one made on the other link. The first runs of three plans calibrate a second prediction. A few layers are timed again
before and after each run, and predictions are those for a machine that computes as fast as it did then; the link is
taken to be as fast as in the profile. The rows have the errors at the speed of the profile as well ("uncorrected").

It needs the right to make network namespaces, and `tc`.
"""

import argparse
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from autotune.prediction.predictor import Predictor
from autotune.search.execution.runner import Runner
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.solver.splits import layer_counts
from autotune.search.space.feasible import feasible_space
from autotune.workload import Prepared, prepare
from benchmarks.cases.drift import at_speed, slowness, timed_profile
from benchmarks.output.result import Check, at_least, at_most, finish, show
from benchmarks.prediction import example
from tests.machines.nodes import cable, two_nodes
from trials import wire
from trials.arrays import Floats
from trials.launchers.node_ranks import NodeLauncher
from trials.outcome import Completed, Measurement
from trials.plan import Layout, Packed, Plan
from trials.run.pool import WarmPool
from trials.stage import Stage

LINKS: Mapping[str, str | None] = {"as it is": None, "100 Mbit/s": "100mbit"}
"""Rates of the cable in the notation of `tc`."""
SAMPLES = 400
BATCH = 8
"""So that the gradients of a step are more than its activations."""
CALIBRATING = 3
TIMED_STEPS = 3
MEDIAN_ERROR = 0.08
AMPLE_BYTES = 2 << 30


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a plan."""

    measurement: Measurement
    slowness: float
    """Of the machine meanwhile, in units of the time that layers took in the profile."""

    @property
    def seconds(self) -> float:
        """Mean of a step."""
        return float(np.mean(self.measurement.step_seconds))


@dataclass(frozen=True, kw_only=True)
class Linked:
    """Both nodes, joined by one of the links, as they were profiled."""

    link: str
    prepared: Prepared
    pool: WarmPool
    predictor: Predictor
    then: Floats
    """Seconds of a few layers at the profile."""

    @cached_property
    def chosen(self) -> Plan:
        """The plan that is predicted fastest."""
        work = self.prepared.workload
        space = feasible_space(work, Solver(self.predictor, Limits.of(work)), remedy="")
        return min(space.starts, key=self.predictor.epoch_seconds)


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        job = example(folder, SAMPLES).job
        training = job.training.model_copy(update={"global_batch_samples": BATCH})
        prepared = prepare(job.model_copy(update={"training": training}), folder / "work")
        hardware = replace(prepared.workload.hardware, nodes=2)
        work = replace(prepared.workload, hardware=hardware, memory_limit_bytes=AMPLE_BYTES)
        prepared = replace(prepared, workload=work)
        with (
            cable() as joined,
            two_nodes(joined) as nodes,
            WarmPool(NodeLauncher(nodes, folder / "ranks", 2, "cpu")) as pool,
        ):
            links = {}
            for name, rate in LINKS.items():
                joined.limit(rate)
                costs, then = timed_profile(prepared, pool, folder / "ranks")
                predictor = Predictor(costs, prepared.epoch, work.model.element_bytes)
                links[name] = Linked(link=name, prepared=prepared, pool=pool, predictor=predictor, then=then)
                show(f"{name}: {links[name].chosen.layout} is predicted fastest")
            chosen = {name: linked.chosen for name, linked in links.items()}
            drawn = _plans(links["as it is"], arguments.plans)
            plans = [*dict.fromkeys((*chosen.values(), *drawn))]
            rows = []
            for name, rate in LINKS.items():
                joined.limit(rate)
                rows += _rows(links[name], plans, arguments.rounds)
    finish(rows, _checks(rows, chosen))


# --- plans ---


def _plans(nodes: Linked, count: int) -> Iterator[Plan]:
    """Yield distinct plans that keep the global batch, every second of them a pipeline."""
    chance, seen = random.Random(0), set[Plan]()
    while len(seen) < count:
        plan = _drawn(nodes.prepared, chance, pipeline=1 + len(seen) % 2)
        if plan not in seen and nodes.predictor.predict(plan).keeps_batch:
            seen.add(plan)
            yield plan


def _drawn(prepared: Prepared, chance: random.Random, pipeline: int) -> Plan:
    model, index = prepared.workload.model, prepared.index
    layers, samples = model.vision_layers + model.language_layers, chance.uniform(1.5, 5)
    qv = max(int(index.vision_units.max()), round(samples * float(index.vision_units.mean())))
    qt = max(int(index.text_tokens.max()), round(samples * float(index.text_tokens.mean())))
    ends = [*sorted(chance.sample(range(layers // 3, layers), pipeline - 1)), layers]
    return Plan(
        packing=Packed(qv=qv, qt=qt, qv_min=qv, qt_min=max(qt - 64, 1), packer=chance.choice(("isf", "best-fit"))),
        layout=Layout(pipeline=pipeline, data=2 // pipeline, zero=chance.choice((0, 1))),
        stages=tuple(
            Stage(
                vision=vision,
                language=language,
                recompute_vision=round(chance.choice((0.0, 0.0, 1.0)) * chance.random() * vision),
                recompute_language=round(chance.choice((0.0, 0.0, 1.0)) * chance.random() * language),
            )
            for vision, language in layer_counts(ends, model.vision_layers)
        ),
    )


# --- runs ---


def _rows(nodes: Linked, plans: Sequence[Plan], rounds: int) -> list[dict[str, Any]]:
    """Run the plans in rounds, and return what was predicted and measured."""
    runner = Runner(nodes.prepared, CalibratedPredictor(nodes.predictor), nodes.pool)
    runs: dict[Plan, list[Run]] = {plan: [] for plan in plans}
    before = slowness(nodes.prepared, nodes.pool, nodes.then)
    for number in range(rounds):
        for plan in random.Random(number).sample(plans, len(plans)):
            outcome = runner.run(plan, timed_steps=TIMED_STEPS).outcome
            assert isinstance(outcome, Completed), outcome
            after = slowness(nodes.prepared, nodes.pool, nodes.then)
            runs[plan].append(Run(measurement=outcome.measurement, slowness=(before + after) / 2))
            show(f"{nodes.link}, round {number + 1}: {plan.id} {plan.layout}, slowness {before:.3f}, then {after:.3f}")
            before = after
    calibrated, uncorrected = CalibratedPredictor(nodes.predictor), CalibratedPredictor(nodes.predictor)
    warmup = nodes.prepared.job.search.warmup_steps
    for plan in plans[-CALIBRATING:]:
        run = runs[plan][0]
        then = nodes.predictor.with_costs(at_speed(nodes.predictor.costs, run.slowness))
        calibrated.observe(plan, run.measurement, warmup, base=then)
        uncorrected.observe(plan, run.measurement, warmup)
    return [
        _row(nodes, plan, runs[plan], calibrated, uncorrected, calibrates=number >= len(plans) - CALIBRATING)
        for number, plan in enumerate(plans)
    ]


def _row(
    nodes: Linked,
    plan: Plan,
    runs: Sequence[Run],
    calibrated: CalibratedPredictor,
    uncorrected: CalibratedPredictor,
    *,
    calibrates: bool,
) -> dict[str, Any]:
    seconds = [run.seconds for run in runs]
    measured, predicted = float(np.median(seconds)), nodes.predictor.predict(plan)
    # The measured steps stand for the epoch.
    ratios = [run.seconds / predicted.step_seconds[list(run.measurement.steps)].mean() for run in runs]
    alone = CalibratedPredictor(nodes.predictor)
    return {
        "link": nodes.link,
        "plan": wire.to_document(plan),
        "id": plan.id,
        "calibrates": calibrates,
        "step_seconds": measured,
        "spread": (max(seconds) - min(seconds)) / measured,
        "slowness": [run.slowness for run in runs],
        "epoch_seconds": float(np.median(ratios)) * predicted.epoch_seconds,
        "error_of_the_profile": _error(alone, plan, runs, [run.slowness for run in runs]),
        "error_after_calibration": _error(calibrated, plan, runs, [run.slowness for run in runs]),
        "uncorrected_error_of_the_profile": _error(alone, plan, runs, [1.0] * len(runs)),
        "uncorrected_error_after_calibration": _error(uncorrected, plan, runs, [1.0] * len(runs)),
    }


def _error(predictor: CalibratedPredictor, plan: Plan, runs: Sequence[Run], slow: Sequence[float]) -> float:
    """Return the median relative error of the predicted steps on a machine that is this slow in each run."""
    errors = []
    for run, slowness_then in zip(runs, slow, strict=True):
        then = predictor.corrected.with_costs(at_speed(predictor.corrected.costs, slowness_then))
        predicted = predictor.epoch_factor * then.step_seconds(plan, run.measurement.steps).mean()
        errors.append(predicted / run.seconds - 1)
    return float(np.median(errors))


def _checks(rows: Sequence[Mapping[str, Any]], chosen: Mapping[str, Plan]) -> list[Check]:
    seconds = {(row["link"], row["id"]): row["epoch_seconds"] for row in rows}
    here, there = LINKS
    checks = [at_least("different plans that are chosen on the two links", [len(set(chosen.values()))], 2)]
    for link, other in ((here, there), (there, here)):
        ratio = seconds[link, chosen[other].id] / seconds[link, chosen[link].id]
        checks.append(at_least(f"{link}: epoch of the plan of the other link, over that of its own", [ratio], 1.0))
    for link in LINKS:
        errors = [abs(row["error_of_the_profile"]) for row in rows if row["link"] == link]
        later = [abs(row["error_after_calibration"]) for row in rows if row["link"] == link and not row["calibrates"]]
        checks.append(at_most(f"{link}: median error, from the profile", [float(np.median(errors))], MEDIAN_ERROR))
        checks.append(at_most(f"{link}: median error after calibration", [float(np.median(later))], MEDIAN_ERROR))
    return checks


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=12, help="drawn at random (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each plan on each link (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
