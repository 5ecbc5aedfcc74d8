"""The schedule simulation: its speed, and how it grows. Prints one JSON object.

    python -m benchmarks.simulator [--plans 10000]

Times of passes and sends are random, seeded. Everything runs on one core. A time is the median
of repeats, in seconds of the processor.
"""

import argparse
import os
import statistics
import time
from itertools import product
from typing import Any

import numpy as np

from autotune.prediction.simulation.schedule import simulate
from benchmarks.output.result import Check, at_most, finish
from trials.arrays import Floats

STAGES, MICRO_BATCHES = 8, 64
SECONDS = 2.0
"""For 10,000 plans of 8 stages and 64 micro-batches."""
GROWTH = 1.1
"""Most exponent of the time's growth with stages x micro-batches; 1 is linear."""
GRID = tuple(product((2, 4, 8, 16), (32, 64, 128, 256)))
"""(stages, micro-batches)"""
GRID_SHARE = 0.1
"""Of the plans, for the grid: its largest corner has eight times the passes."""
EQUAL_PACKS_ERROR = 1e-9
REPEATS = 5


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    plans = _arguments().plans
    cases = [(plans, STAGES, MICRO_BATCHES), *((max(1, int(plans * GRID_SHARE)), *shape) for shape in GRID)]
    rows = [_timed(*case) for case in cases]
    finish([*rows, {"exponents": _exponents(rows[1:])}], _checks(rows))


def _timed(plans: int, stages: int, micro_batches: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    forward, backward = random.random((2, plans, micro_batches, stages))
    sends = 0.1 * random.random((plans, micro_batches, stages - 1))
    kinds = {"seconds": (forward, backward, sends), "seconds_without_sends": (forward, backward, None)}
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(REPEATS):
        for name, times in kinds.items():
            start = time.process_time()
            simulate(*times)
            seconds[name].append(time.process_time() - start)
    return {
        "plans": plans,
        "stages": stages,
        "micro_batches": micro_batches,
        **{name: statistics.median(values) for name, values in seconds.items()},
        "most_seconds": max(seconds["seconds"]),
        "equal_packs_error": _equal_packs_error(stages, micro_batches),
    }


def _equal_packs_error(stages: int, micro_batches: int) -> float:
    """Return the relative error against (m + P - 1) (forward + backward)."""
    passes: Floats = np.ones((1, micro_batches, stages))
    return float(abs(simulate(passes, 2 * passes).seconds[0] / (3 * (micro_batches + stages - 1)) - 1))


def _exponents(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return slopes of log time over log size, by least squares: of both together, and of each with the other fixed."""
    seconds = np.log([row["seconds"] for row in rows])
    stages, micro_batches = (np.log([row[name] for row in rows]) for name in ("stages", "micro_batches"))
    both = np.polyfit(stages + micro_batches, seconds, 1)[0]
    columns = np.stack([stages, micro_batches, np.ones(len(rows))], axis=1)
    of_stages, of_micro_batches, _ = np.linalg.lstsq(columns, seconds, rcond=None)[0]
    return {
        "stages x micro-batches": float(both),
        "stages": float(of_stages),
        "micro-batches": float(of_micro_batches),
    }


def _checks(rows: list[dict[str, Any]]) -> list[Check]:
    scale = 10_000 / rows[0]["plans"]
    return [
        at_most("seconds for 10,000 plans of 8 stages x 64 micro-batches", [rows[0]["most_seconds"] * scale], SECONDS),
        at_most("exponent of the growth", _exponents(rows[1:]).values(), GROWTH),
        at_most(
            "error against the closed form of equal packs", (r["equal_packs_error"] for r in rows), EQUAL_PACKS_ERROR
        ),
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=10_000, help="simulated together (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
