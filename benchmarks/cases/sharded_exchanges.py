"""Measured and predicted steps of ZeRO 1, 2 and 3 on two nodes. Prints one JSON object.

    python -m benchmarks.cases.sharded_exchanges [--rounds 4] [--rates 100mbit 1gbit]

The nodes are this machine and a network namespace, joined by a virtual cable with one rate after the other; each has
one rank. With each rate the layers and exchanges of the model of examples/tiny-internvl are profiled over both, and
plans with ZeRO 1, 2 and 3 take turns on the same steps, packs of about 2 samples, 8 in a step. `unhidden` is the
prediction of steps whose exchanges run while nothing is computed. `hidden` is the share of the exchanges in passes that
the measured steps save over that. It needs the right to make network namespaces, and `tc`.
"""

import argparse
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from autotune.prediction.predictor import Predictor
from autotune.search.execution.profiling import profile_layers
from autotune.workload import Prepared, prepare
from benchmarks.output.result import Check, at_least, at_most, finish, show
from benchmarks.prediction import example
from tests.machines.nodes import cable, two_nodes
from trials.costs.layer_costs import LayerCosts
from trials.launchers.node_ranks import NodeLauncher
from trials.plan import Layout, Packed, Plan, ZeroStage
from trials.run.pool import Answers, WarmPool
from trials.stage import Stage
from trials.tasks.answer import TrialReport
from trials.tasks.request import Trial

ZEROS: tuple[ZeroStage, ...] = (1, 2, 3)
STEPS = Trial(warmup_steps=(0, 1), timed_steps=(2, 3, 4))
SAMPLES, BATCH, OF_PACK = 400, 8, 2
AMPLE_BYTES = 2 << 30
MEDIAN_ERROR, HIDDEN = 0.08, 0.7


def main() -> None:
    arguments = _arguments()
    rows = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        prepared = _prepared(folder)
        plans = {zero: _plan(prepared, zero) for zero in ZEROS}
        with (
            cable() as joined,
            two_nodes(joined) as nodes,
            WarmPool(NodeLauncher(nodes, folder / "ranks", 2, "cpu")) as pool,
        ):
            for rate in arguments.rates:
                joined.limit(rate)
                costs = profile_layers(prepared, pool, folder / "ranks")
                measured: dict[ZeroStage, list[float]] = {zero: [] for zero in ZEROS}
                for number in range(arguments.rounds):
                    for zero in random.Random(number).sample(ZEROS, len(ZEROS)):
                        measured[zero].append(_step_seconds(prepared, pool, plans[zero]))
                        show(f"{rate}, round {number + 1}, ZeRO {zero}: {measured[zero][-1]:.2f} s")
                rows += [_row(rate, prepared, costs, plans[zero], found) for zero, found in measured.items()]
    finish(rows, _checks(rows))


def _prepared(folder: Path) -> Prepared:
    job = example(folder, SAMPLES).job
    training = job.training.model_copy(update={"global_batch_samples": BATCH})
    prepared = prepare(job.model_copy(update={"training": training}), folder / "work")
    hardware = replace(prepared.workload.hardware, nodes=2)
    return replace(prepared, workload=replace(prepared.workload, hardware=hardware, memory_limit_bytes=AMPLE_BYTES))


def _plan(prepared: Prepared, zero: ZeroStage) -> Plan:
    model, index = prepared.workload.model, prepared.index
    qv, qt = (
        max(int(sizes.max()), round(OF_PACK * float(sizes.mean()))) for sizes in (index.vision_units, index.text_tokens)
    )
    return Plan(
        packing=Packed(qv=qv, qt=qt, qv_min=qv, qt_min=qt - 64, packer="best-fit"),
        layout=Layout(pipeline=1, data=2, zero=zero),
        stages=(Stage(vision=model.vision_layers, language=model.language_layers),),
    )


def _step_seconds(prepared: Prepared, pool: WarmPool, plan: Plan) -> float:
    answer = pool.ask(prepared.request(plan, STEPS), 400)
    assert isinstance(answer, Answers), answer
    report = answer.reports[0]
    assert isinstance(report, TrialReport)
    return fmean(report.step_seconds)


def _row(rate: str, prepared: Prepared, costs: LayerCosts, plan: Plan, measured: Sequence[float]) -> dict[str, Any]:
    """Return the times of a plan, in seconds of a step."""
    alone = replace(costs, exchanges=tuple(replace(each, added_share=1.0) for each in costs.exchanges))
    free = replace(costs, exchanges=tuple(each.times(0.0) for each in costs.exchanges))
    predicted, unhidden, without = (_predicted(prepared, each, plan) for each in (costs, alone, free))
    found, exchanged = median(measured), unhidden - without
    is_sharded = plan.layout.shards_gradients
    scatter = costs.exchange("scatter")
    return {
        "rate": rate,
        "zero": plan.layout.zero,
        "step_seconds": found,
        "least": min(measured),
        "most": max(measured),
        "predicted": predicted,
        "unhidden": unhidden,
        "error": abs(predicted / found - 1),
        "profiled_share": 1 - scatter.added_share if scatter else 0.0,
        "hidden": (unhidden - found) / exchanged if is_sharded and exchanged else 0.0,
        "could_hide": exchanged <= without,
    }


def _predicted(prepared: Prepared, costs: LayerCosts, plan: Plan) -> float:
    """Return the mean seconds of the timed steps."""
    seconds = Predictor(costs, prepared.epoch, prepared.workload.model.element_bytes).predict(plan).step_seconds
    return float(seconds[list(STEPS.timed_steps)].mean())


def _checks(rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    sharded = [row for row in rows if row["zero"] > 1]
    error = median(row["error"] for row in sharded)
    hidden = [row["hidden"] for row in sharded if row["could_hide"]]
    return [
        at_most("error of predicted steps with ZeRO 2 and 3, at the median", [error], MEDIAN_ERROR),
        at_least("hidden share of exchanges that take less time than passes", hidden, HIDDEN),
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="runs of each plan (%(default)s)")
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"], help="of the cable, as `tc` has them")
    return parser.parse_args()


if __name__ == "__main__":
    main()
