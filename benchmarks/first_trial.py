"""What a search computes before its first trial, by number of devices. Prints one JSON object.

    python -m benchmarks.first_trial [--devices 4 16 64 128 4096]
    python -m benchmarks.first_trial --excerpts [--lengths FOLDER]

With `--excerpts`, plans that are compared on an excerpt of a long epoch are compared with those of the whole epoch
(`benchmarks/cases/excerpts.py`). Without:

InternViT-6B with InternLM2-20B, 45 and 48 layers, on nodes of 8 devices, with 16 samples of each device in a step and 8
steps in an epoch; and 8 devices with an epoch of 1.27 million samples. CPU seconds of one core: of the space, for which
layouts and capacities are solved until the best layouts are known; of the plan that is tried first; and of the first
proposal, which comes after the trials of such plans and solves the rest. The peak memory is that of a process for each
row.
"""

import argparse
import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.sampling.advisor import Advisor
from benchmarks.cases import excerpts
from benchmarks.cases.lengths import add_lengths
from benchmarks.cases.solver import INTERN_LM2_20B, INTERN_VIT_6B
from benchmarks.machines.analytic import LABEL
from benchmarks.output.result import at_most, finish

DEVICES = (4, 16, 64, 128, 4096)
LONG = 8, 1_270_000
"""Devices, and samples of a long epoch."""
SECONDS = {4: 2.0, 16: 2.0, 64: 10.0, 128: 10.0, 4096: 60.0}
"""At most before the first trial."""
MEBIBYTES = 1024.0
"""At most with the first proposal, however many devices there are; the modules that are imported take 400 of them."""
NEARLY = 1.2
"""As in a search: the largest ratio to the best predicted time of the plans that are tried first."""
_FEW = 128
Answer = TypeVar("Answer")


def main() -> None:
    arguments = _arguments()
    if arguments.excerpts:
        found = list(excerpts.rows(arguments.lengths))
        finish(found, excerpts.checks(found))
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    cases = [*((each, None) for each in sorted(arguments.devices)), LONG]
    # Each row in a process of its own, whose peak is that of the row alone.
    with ProcessPoolExecutor(1, max_tasks_per_child=1) as pool:
        rows = list(pool.map(_row, *zip(*cases, strict=True)))
    checks = [
        at_most(f"seconds before the first trial on {row['devices']} devices", [row["before"]], SECONDS[row["devices"]])
        for row in rows
        if row["devices"] in SECONDS and row["samples"] != LONG[1]
    ]
    checks.append(at_most("peak MiB on any number of devices", [row["peak_mebibytes"] for row in rows], MEBIBYTES))
    finish(rows, checks)


def _row(devices: int, samples: int | None) -> dict[str, Any]:
    few = excerpts.LongWorkload(name="first", vision=INTERN_VIT_6B, language=INTERN_LM2_20B, devices=min(devices, _FEW))
    # Of few devices, since this packs a whole epoch; more devices have as much memory each.
    limit = few.memory_limit_bytes
    workload = replace(few, devices=devices, memory=limit, samples_of_epoch=samples)
    prepared = workload.prepared(trials=12)
    predictor, of_excerpt = _timed(
        lambda: CalibratedPredictor.of_job(
            prepared.job, prepared.index, prepared.weights, costs=workload.costs, element_bytes=2
        )
    )
    space, of_space = _timed(lambda: workload.space(predictor.profiled))
    advisor = Advisor(space, predictor, workload.limits(limit), prepared.job.search)
    plan, of_plan = _timed(lambda: next(advisor.predicted(NEARLY)))
    _, of_proposal = _timed(advisor.propose)
    return {
        "devices": devices,
        "costs": LABEL,
        "samples": len(workload.index),
        "compared_samples": len(predictor.profiled.sizes(plan.packing, plan.layout).epoch.index),
        "layouts": len({start.layout for start in space.starts}),
        "with_a_tensor_degree": len({start.layout for start in space.starts if start.layout.tensor > 1}),
        "starts": len(space.starts),
        "predicted_seconds": predictor.epoch_seconds(plan),
        "space": of_excerpt + of_space,
        "predicted": of_plan,
        "before": of_excerpt + of_space + of_plan,
        "proposal": of_proposal,
        "peak_mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def _timed(function: Callable[[], Answer]) -> tuple[Answer, float]:
    start = time.process_time()
    return function(), time.process_time() - start


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    parser.add_argument("--excerpts", action="store_true", help="compare plans of excerpts with those of whole epochs")
    add_lengths(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
