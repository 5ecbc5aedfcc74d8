"""Stated and true probability of winners, on simulated machines with and without disturbance. Prints one JSON object.

    python -m benchmarks.certainty [--searches 300] [--processes 2]

Each search is on another workload or at another time, on a machine whose costs differ from the profile. A winner is
right if the machine, without noise, runs no plan faster that it was compared with. The winners are put into deciles by
the probability that was stated.
"""

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import fmean
from typing import Any

import optuna

from benchmarks.cases.workloads import NOISY, workloads
from benchmarks.output.result import Check, at_most, finish, show
from benchmarks.search import search

MACHINES = {"quiet": NOISY, "disturbed": replace(NOISY, disturbed_share=0.6)}
TRIALS = 10
WORKLOADS = 180
MOST_DEVICES = 4
"""A search on more devices takes minutes of a core, and the deciles need hundreds of searches."""
LEAST_CASES = 20
BAR = 0.10


def main() -> None:
    arguments = _arguments()
    tasks = [(name, number) for number in range(arguments.searches) for name in MACHINES]
    cases: list[dict[str, Any]] = []
    with ProcessPoolExecutor(arguments.processes) as pool:
        for case in pool.map(_case, *zip(*tasks, strict=True)):
            show(case)
            cases.append(case)
    rows = [row for name in MACHINES for row in deciles(name, cases)]
    finish(rows, checks(rows))


def _case(name: str, number: int) -> dict[str, Any]:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    small = [workload for workload in workloads(WORKLOADS) if workload.devices <= MOST_DEVICES]
    workload = small[number % len(small)]
    found = search(workload, TRIALS, MACHINES[name], seed=number)
    return {"machine": name, "stated": found.confidence, "right": found.is_fastest, "named": found.is_named}


def deciles(name: str, cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each tenth of the stated probabilities in which there are winners of this machine."""
    stated = [case for case in cases if case["machine"] == name and case["stated"] is not None]
    rows = []
    for decile in range(10):
        inside = [case for case in stated if min(int(10 * case["stated"]), 9) == decile]
        if inside:
            rows.append(
                {
                    "machine": name,
                    "decile": decile,
                    "cases": len(inside),
                    "stated": fmean(case["stated"] for case in inside),
                    "right": fmean(case["right"] for case in inside),
                    "right_or_tie": fmean(case["named"] for case in inside),
                }
            )
    return rows


def checks(rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    return [
        at_most(
            f"difference of stated and true probability in a decile of {LEAST_CASES} winners or more, {name}",
            [
                abs(row["stated"] - row["right"])
                for row in rows
                if row["machine"] == name and row["cases"] >= LEAST_CASES
            ],
            BAR,
        )
        for name in MACHINES
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=300, help="searches on each of the two machines")
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
