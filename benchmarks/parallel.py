"""Plans with tensor degrees, shared packs or levels: predictions and real runs, or a search. Prints one JSON object.

    python -m benchmarks.parallel [--rounds 3] [--rows parallel-rows.jsonl]
    python -m benchmarks.parallel --ladders
    python -m benchmarks.parallel --layouts

With `--ladders`, searches on samples of mixed lengths are compared with HBP's recipe, by analytic costs
(`benchmarks/cases/ladders.py`). With `--layouts`, the layouts of a large model are compared, also with tensor degrees
(`benchmarks/cases/layouts.py`). Without, predictions are compared with real runs on the model of
examples/tiny-internvl, for 2 and for 4 ranks: profiles the layers and the exchanges, draws plans at random (tensor and
sequence degrees, of which one is above 1, levels, pipelines, splits, recomputation) and runs each of them in every
round, each time on the same steps, of all costs. Each rank has an equal share of the cores to itself
(`benchmarks/cases/equal_cores.py`), for which Linux's control groups must be writable. A plan's time is the median of
its rounds, at the speed that the machine had in the profile. The first runs of the first five plans calibrate the
prediction, with which the others are compared; the peak bytes of all plans are compared without calibration. What was
run is kept in the file `--rows`, from which an ended benchmark goes on.
"""

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import Field

from autotune.prediction.predictor import Predictor
from autotune.search.execution.runner import Runner
from autotune.search.learning.calibrated import CalibratedPredictor, peaks
from autotune.search.solver.splits import layer_counts
from autotune.workload import Prepared
from benchmarks.cases import ladders, layouts
from benchmarks.cases.drift import at_profiled_speed, slowness, timed_profile
from benchmarks.cases.equal_cores import equal_cores
from benchmarks.output.result import Check, at_least, at_most, finish, show
from benchmarks.prediction import example
from trials import wire
from trials.costs.layer_costs import LayerCosts
from trials.launchers.local import LocalLauncher
from trials.outcome import Completed, Measurement, Outcome
from trials.plan import Layout, Levelled, Packed, Packing, Plan, ZeroStage
from trials.run.pool import WarmPool
from trials.stage import Recomputed, Stage

PLANS = {2: 10, 4: 25}
"""Plans for each number of ranks."""
TENSOR = 2
"""Greatest tensor degree: the model has two key heads."""
SAMPLES = 400
CALIBRATING = 5
TIMED_STEPS = 6
LEAST_PLANS = 20
AMPLE_BYTES = 2 << 30
MEDIAN_ERROR, BYTE_ERROR = 0.10, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    """The layer costs that were profiled on a number of ranks."""

    ranks: int
    costs: LayerCosts
    seconds: tuple[float, ...]
    """Of a few layers at the profile."""
    kind: Literal["profile"] = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a plan."""

    plan: Plan
    round: int
    outcome: Outcome
    slowness: float
    """Of the machine, in units of the time that layers took in the profile."""
    kind: Literal["run"] = "run"

    @property
    def measurement(self) -> Measurement | None:
        """The measurement at the speed of the profile; None where the plan failed."""
        if not isinstance(self.outcome, Completed):
            return None
        return at_profiled_speed(self.outcome.measurement, self.slowness)


_Row: TypeAlias = Annotated[Profiled | Run, Field(discriminator="kind")]


class Rows:
    """A file with a line for each profile and run."""

    def __init__(self, path: Path) -> None:
        self.profiles: dict[int, Profiled] = {}
        self.runs: list[Run] = []
        self._path = path
        for line in path.read_text().splitlines() if path.exists() else []:
            self._add(wire.decode(_Row, line))

    def keep(self, row: Profiled | Run) -> None:
        with self._path.open("a") as file:
            file.write(wire.encode(row, _Row) + "\n")
        self._add(row)

    def _add(self, row: Profiled | Run) -> None:
        if isinstance(row, Run):
            self.runs.append(row)
        else:
            self.profiles[row.ranks] = row


def main() -> None:
    arguments = _arguments()
    if arguments.ladders:
        found = [*ladders.rows()]
        finish(found, ladders.checks(found))
    if arguments.layouts:
        found = [*layouts.rows()]
        finish(found, layouts.checks(found))
    rows = Rows(arguments.rows)
    compared: list[dict[str, Any]] = []
    failed = 0
    for ranks, count in PLANS.items():
        with tempfile.TemporaryDirectory() as folder:
            prepared = example(Path(folder), SAMPLES, devices=ranks)
            prepared = replace(prepared, workload=replace(prepared.workload, memory_limit_bytes=AMPLE_BYTES))
            with (
                equal_cores(LocalLauncher(Path(folder) / "ranks", ranks, "cpu")) as launcher,
                WarmPool(launcher) as pool,
            ):
                if ranks not in rows.profiles:
                    costs, then = timed_profile(prepared, pool, Path(folder) / "ranks")
                    rows.keep(Profiled(ranks=ranks, costs=costs, seconds=tuple(then.tolist())))
                costs, then = rows.profiles[ranks].costs, np.array(rows.profiles[ranks].seconds)
                predictor = Predictor(costs, prepared.epoch, prepared.workload.model.element_bytes)
                plans = list(_plans(prepared, predictor, count, ranks))
                runner = Runner(prepared, CalibratedPredictor(predictor), pool)
                machine = partial(slowness, prepared, pool, then)
                _run_all(runner, plans, rows, arguments.rounds, machine)
            of_plans = [[run for run in rows.runs if run.plan == plan] for plan in plans]
            done = [runs for runs in of_plans if all(run.measurement for run in runs)]
            failed += len(of_plans) - len(done)
            compared += _compared(prepared, predictor, done)
    finish(
        [
            *compared,
            *({"ranks": ranks, "costs": wire.to_document(each.costs)} for ranks, each in rows.profiles.items()),
        ],
        _checks(compared, failed),
    )


# --- plans ---


def _plans(prepared: Prepared, predictor: Predictor, count: int, ranks: int) -> Iterator[Plan]:
    """Yield distinct plans that keep the global batch, and in which ranks share packs or hold layers together."""
    chance, seen = random.Random(ranks), set[Plan]()
    while len(seen) < count:
        plan = _drawn(prepared, chance, ranks)
        if plan in seen or max(plan.layout.tensor, *plan.packing.degrees) == 1:
            continue
        if not predictor.predict(plan).keeps_batch:
            continue
        seen.add(plan)
        yield plan


def _drawn(prepared: Prepared, chance: random.Random, ranks: int) -> Plan:
    model, tensor = prepared.workload.model, chance.choice((1, TENSOR))
    data = chance.choice([degree for degree in (1, 2, 4) if degree * tensor <= ranks])
    zero: ZeroStage = chance.choice((0, 1))
    layout = Layout(pipeline=ranks // (data * tensor), data=data, tensor=tensor, zero=zero)
    layers = model.vision_layers + model.language_layers
    ends = [*sorted(chance.sample(range(1, layers), layout.pipeline - 1)), layers]
    packing = _packing(prepared, chance, data)
    further = len(packing.degrees) - 1
    stages = tuple(_stage(*counts, further, chance) for counts in layer_counts(ends, model.vision_layers))
    return Plan(packing=packing, layout=layout, stages=stages)


def _packing(prepared: Prepared, chance: random.Random, data: int) -> Packing:
    """Return one level, or two of which ranks share at most one."""
    index, degrees = prepared.index, [degree for degree in (1, 2, 4) if degree <= data]
    longest, samples = int(index.text_tokens.max()), chance.uniform(2, 6)
    units, mean = int(index.vision_units.max()), float(index.text_tokens.mean())
    whole = Packed(
        qv=max(units, round(samples * float(index.vision_units.mean()))),
        qt=max(longest, round(samples * mean)),
        qv_min=0,
        qt_min=0,
        packer="best-fit",
    )
    if chance.random() < 1 / 2:
        return replace(whole, sequence=chance.choice(degrees))
    middle = int(np.quantile(index.text_tokens, chance.uniform(0.5, 0.8)))
    short = replace(whole, qt=max(middle, round(samples * mean / 2)))
    if short.qt >= longest:
        short = replace(short, qt=middle)
    return Levelled(levels=(short, replace(whole, sequence=chance.choice(degrees))))


def _stage(vision: int, language: int, further: int, chance: random.Random) -> Stage:
    share = chance.choice((0.0, 0.5, 1.0))
    more = (
        Recomputed(vision=round(chance.random() * vision), language=round(chance.random() * language))
        for _ in range(further)
    )
    return Stage(
        vision=vision,
        language=language,
        recompute_vision=round(share * chance.random() * vision),
        recompute_language=round(share * chance.random() * language),
        further_levels=tuple(more),
    )


def _run_all(runner: Runner, plans: Sequence[Plan], rows: Rows, rounds: int, slowness_now: Callable[[], float]) -> None:
    done = {(run.plan, run.round) for run in rows.runs}
    for number in range(rounds):
        for plan in random.Random(number).sample(plans, len(plans)):
            if (plan, number) in done:
                continue
            before = slowness_now()
            outcome = runner.run(plan, timed_steps=TIMED_STEPS).outcome
            rows.keep(Run(plan=plan, round=number, outcome=outcome, slowness=(before + slowness_now()) / 2))
            show(f"round {number + 1}: {plan.id} {outcome.kind}")


# --- what came of them ---


def _compared(prepared: Prepared, predictor: Predictor, done: Sequence[Sequence[Run]]) -> list[dict[str, Any]]:
    uncalibrated, calibrated = CalibratedPredictor(predictor), CalibratedPredictor(predictor)
    warmup, found = prepared.job.search.warmup_steps, []
    for runs in done[:CALIBRATING]:
        calibrated.observe(runs[0].plan, _measured(runs[0]), warmup)
    for number, runs in enumerate(done):
        plan, measurement = runs[0].plan, _measured(runs[0])
        steps = list(measurement.steps)
        measured = float(np.median([np.mean(_measured(run).step_seconds) for run in runs]))
        before, after = (
            float(each.predict(plan).step_seconds[steps].mean() / measured - 1) for each in (uncalibrated, calibrated)
        )
        found.append(
            {
                "ranks": plan.layout.world_size,
                "plan": wire.to_document(plan),
                "degrees": plan.packing.degrees,
                "calibrates": number < CALIBRATING,
                "step_seconds": measured,
                "error_of_the_profile": before,
                "error_after_calibration": after,
                "byte_errors": [
                    peak.predicted.expected / peak.measured - 1 for peak in peaks(predictor, plan, measurement, warmup)
                ],
            }
        )
    return found


def _measured(run: Run) -> Measurement:
    measurement = run.measurement
    assert measurement is not None, "only plans that completed are compared"
    return measurement


def _checks(compared: Sequence[dict[str, Any]], failed: int) -> list[Check]:
    later = [abs(each["error_after_calibration"]) for each in compared if not each["calibrates"]]
    byte_errors = [abs(error) for each in compared for error in each["byte_errors"]]
    return [
        at_least("plans that were compared after the calibration", [len(later)], LEAST_PLANS),
        at_most("median error of the step time", [float(np.median(later))] if later else [], MEDIAN_ERROR),
        at_most("median error of the peak bytes", [float(np.median(byte_errors))] if byte_errors else [], BYTE_ERROR),
        at_most("plans that failed", [failed], 0),
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ladders", action="store_true", help="search by analytic costs instead")
    parser.add_argument("--layouts", action="store_true", help="compare layouts by analytic costs instead")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each plan (%(default)s)")
    parser.add_argument(
        "--rows", type=Path, default=Path("parallel-rows.jsonl"), help="what is done; goes on from there"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
