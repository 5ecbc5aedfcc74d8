"""Steps of 1F1B and of its schedule without bubbles (ZB-H1), measured and predicted. Prints one JSON object.

    python -m benchmarks.cases.zero_bubble [--ranks 2] [--rounds 5]

The model of examples/tiny-internvl trains on packs of about 2 samples, 4, 8 and 16 in a step, in as many stages as
there are ranks. Each rank has an equal share of the cores. The layers are profiled first. The plan of least predicted
time with 1F1B takes turns with the same plan whose stages defer weight gradients, and with the best one that defers
them within the bytes of the first; all on the same steps. A ratio is that of one turn.
"""

import argparse
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import fmean, median
from typing import Any

from autotune.plan_text import plan_text
from autotune.prediction.chosen_steps import ChosenSteps
from autotune.prediction.predictor import Predictor
from autotune.search.execution.profiling import profile_layers
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.workload import Prepared, prepare
from benchmarks.cases.equal_cores import equal_cores
from benchmarks.output.result import Check, at_most, finish, show
from benchmarks.prediction import example
from trials.costs.layer_costs import LayerCosts
from trials.launchers.local import LocalLauncher
from trials.plan import Layout, Packed, Plan
from trials.run.pool import Answers, WarmPool
from trials.tasks.answer import TrialReport
from trials.tasks.request import Trial

COUNTS = (4, 8, 16)
"""Packs of a step."""
STEPS = Trial(warmup_steps=(0,), timed_steps=(1, 2))
SAMPLES, OF_PACK = 400, 2
AMPLE_BYTES = 4 << 30
WITHIN = "ZB-H1 within the bytes of 1F1B"


def main() -> None:
    arguments = _arguments()
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        whole = example(folder, SAMPLES, devices=arguments.ranks)
        launcher = LocalLauncher(folder / "ranks", arguments.ranks, "cpu")
        with equal_cores(launcher) as ranks, WarmPool(ranks) as pool:
            costs = profile_layers(whole, pool, folder / "ranks")
            for count in COUNTS:
                prepared = _with_packs(whole, count, folder / str(count))
                rows.append(_compared(prepared, costs, pool, arguments))
                show(rows[-1])
    finish(rows, _checks(rows))


def _with_packs(whole: Prepared, count: int, folder: Path) -> Prepared:
    training = whole.job.training.model_copy(update={"global_batch_samples": OF_PACK * count})
    prepared = prepare(whole.job.model_copy(update={"training": training}), folder)
    return replace(prepared, workload=replace(prepared.workload, memory_limit_bytes=AMPLE_BYTES))


def _compared(prepared: Prepared, costs: LayerCosts, pool: WarmPool, arguments: argparse.Namespace) -> dict[str, Any]:
    predictor = Predictor(costs, prepared.epoch, prepared.workload.model.element_bytes)
    plans = _plans(prepared, predictor, arguments.ranks)
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    peaks: dict[str, list[int]] = {}
    for number in range(arguments.rounds):
        for name in random.Random(number).sample([*plans], len(plans)):
            reports = _reports(prepared, pool, plans[name])
            seconds[name].append(fmean(reports[0].step_seconds))
            peaks[name] = [report.stage.peak_bytes for report in reports]
    ran = (*STEPS.warmup_steps, *STEPS.timed_steps)
    sizes = {name: ChosenSteps(predictor.sizes(plan.packing, plan.layout), ran) for name, plan in plans.items()}
    predicted = {name: float(predictor.step_seconds(plan, STEPS.timed_steps).mean()) for name, plan in plans.items()}
    ratios = {
        name: [one / other for one, other in zip(found, seconds["1F1B"], strict=True)]
        for name, found in seconds.items()
        if name != "1F1B"
    }
    return {
        "ranks": arguments.ranks,
        "packs": prepared.epoch(plans["1F1B"].packing, 1).micro_batches,
        "plans": {name: plan_text(plan) for name, plan in plans.items()},
        "step_seconds": {name: median(found) for name, found in seconds.items()},
        "predicted_seconds": predicted,
        "ratio": {name: median(found) for name, found in ratios.items()},
        "ratios": ratios,
        "predicted_ratio": {name: predicted[name] / predicted["1F1B"] for name in ratios},
        "peak_bytes": peaks,
        "predicted_bytes": {
            name: [each.expected for each in predictor.stage_memory(plan, sizes[name])] for name, plan in plans.items()
        },
    }


def _plans(prepared: Prepared, predictor: Predictor, ranks: int) -> dict[str, Plan]:
    index = prepared.index
    qv, qt = (
        max(int(sizes.max()), round(OF_PACK * float(sizes.mean()))) for sizes in (index.vision_units, index.text_tokens)
    )
    packing = Packed(qv=qv, qt=qt, qv_min=qv, qt_min=qt - 64, packer="best-fit")
    usual = Layout(pipeline=ranks, data=1, zero=0)
    solver, deferring = Solver(predictor, Limits.of(prepared.workload)), replace(usual, zero_bubble=True)
    plan = solver.solve(packing, usual)
    assert plan is not None
    limits = replace(Limits.of(prepared.workload), memory_limit_bytes=ceil(solver.fullest(plan)[0]), usable_share=1.0)
    within = Solver(predictor, limits).solve(packing, deferring)
    return {"1F1B": plan, "ZB-H1": replace(plan, layout=deferring), **({WITHIN: within} if within else {})}


def _reports(prepared: Prepared, pool: WarmPool, plan: Plan) -> list[TrialReport]:
    answer = pool.ask(prepared.request(plan, STEPS), 300)
    assert isinstance(answer, Answers), answer
    return [report for report in answer.reports if isinstance(report, TrialReport)]


def _checks(rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    errors = [
        abs(ratio / predicted - 1)
        for row in rows
        for ratio, predicted in zip(row["ratio"].values(), row["predicted_ratio"].values(), strict=True)
    ]
    more = [
        max(row["peak_bytes"][WITHIN]) / max(row["peak_bytes"]["1F1B"]) for row in rows if WITHIN in row["peak_bytes"]
    ]
    of_bytes = [
        abs(predicted / measured - 1)
        for row in rows
        for name, peaks in row["peak_bytes"].items()
        for predicted, measured in zip(row["predicted_bytes"][name], peaks, strict=True)
    ]
    return [
        at_most("ratio of both schedules, measured over predicted, less 1", errors, 0.03),
        at_most(f"most bytes of a rank with {WITHIN}, over those with 1F1B", more, 1.0),
        at_most("error of the predicted peak bytes", of_bytes, 0.02),
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="stages, each on a rank of its own (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="turns of both schedules (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
