"""What a search computes before its first trial, by number of devices. Prints one JSON object.

    python -m benchmarks.first_trial [--devices 4 16 64 128]

InternViT-6B with InternLM2-20B, 45 and 48 layers, on nodes of 8 devices, with 16 samples of each device in a step and 8
steps in an epoch. CPU seconds of one core: of the space, for which layouts and capacities are solved until the best
layouts are known; of the plan that is tried first; and of the first proposal, which comes after the trials of such
plans and solves the rest. The peak memory is that of the process, which computes the rows in the order of their
devices.
"""

import argparse
import os
import resource
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from autotune.prediction.analytic import LABEL
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.sampling.advisor import Advisor
from benchmarks.cases.layouts import Cut
from benchmarks.cases.solver import INTERN_LM2_20B, INTERN_VIT_6B
from benchmarks.output.result import at_most, finish

DEVICES = (4, 16, 64, 128)
SECONDS = {4: 2.0, 16: 2.0, 64: 10.0, 128: 10.0, 4096: 60.0}
"""At most before the first trial."""
NEARLY = 1.2
"""As in a search: the largest ratio to the best predicted time of the plans that are tried first."""
_OF_NODE = 8
Answer = TypeVar("Answer")


def main() -> None:
    devices = _arguments().devices
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = [_row(each) for each in sorted(devices)]
    checks = [
        at_most(f"seconds before the first trial on {row['devices']} devices", [row["before"]], SECONDS[row["devices"]])
        for row in rows
        if row["devices"] in SECONDS
    ]
    finish(rows, checks)


def _row(devices: int) -> dict[str, Any]:
    workload = Cut(
        name="first",
        vision=INTERN_VIT_6B,
        language=INTERN_LM2_20B,
        tensor=1,
        data="tiles up to 5",
        devices=devices,
        room=0.4,
        seed=0,
        nodes=-(-devices // _OF_NODE),
    )
    limit = workload.memory_limit_bytes
    # The epochs that were built to choose the memory are forgotten.
    workload = replace(workload, memory=limit)
    predictor, settings = workload.predictor, workload.prepared(trials=12).job.search
    space, of_space = _timed(lambda: workload.space(predictor))
    advisor = Advisor(space, CalibratedPredictor(predictor), workload.limits(limit), settings)
    plan, of_plan = _timed(lambda: next(advisor.predicted(NEARLY)))
    _, of_proposal = _timed(advisor.propose)
    return {
        "devices": devices,
        "costs": LABEL,
        "samples": len(workload.index),
        "layouts": len({start.layout for start in space.starts}),
        "with_a_tensor_degree": len({start.layout for start in space.starts if start.layout.tensor > 1}),
        "starts": len(space.starts),
        "predicted_seconds": predictor.epoch_seconds(plan),
        "space": of_space,
        "predicted": of_plan,
        "before": of_space + of_plan,
        "proposal": of_proposal,
        "peak_mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def _timed(function: Callable[[], Answer]) -> tuple[Answer, float]:
    start = time.process_time()
    return function(), time.process_time() - start


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=DEVICES)
    return parser.parse_args()


if __name__ == "__main__":
    main()
