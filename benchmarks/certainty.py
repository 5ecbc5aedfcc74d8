"""Stated and true probability of winners, on simulated machines with and without disturbance. Prints one JSON object.

    python -m benchmarks.certainty [--searches 300] [--processes 2] [--rows FILE]

What is done is kept in a file of rows, and a run that was ended goes on from there.

Each search is on a machine of its own, whose costs differ from the profile: machines with the product's formulas,
quiet, disturbed in 6 of 10 runs, or in all, and machines of other forms (`benchmarks/machines`), on which nothing was
tuned. A winner is right if the machine, without noise, runs no plan faster that it was compared with. The winners are
put into deciles by the probability that was stated.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna

from benchmarks.cases.workloads import NOISY, SimulatedWorkload, workloads
from benchmarks.machines.jobs import machine_job
from benchmarks.output.result import Check, at_most, finish, show
from benchmarks.output.rows import done_rows
from benchmarks.search import search

OTHER_FORMS = "other forms"
MACHINES = {
    "quiet": NOISY,
    "disturbed": replace(NOISY, disturbed_share=0.6),
    "always disturbed": replace(NOISY, disturbed_share=1.0),
    OTHER_FORMS: NOISY,
}
TRIALS = 10
WORKLOADS = 180
MOST_DEVICES = 4
"""A search on more devices takes minutes of a core, and the deciles need hundreds of searches."""
FIRST_SEED = 200
"""Of machines of other forms: those before are for tuning, or for the regret of searches."""
LEVELS = (1.0, 0.5)
"""Of the distortions of machines of other forms, in turns."""
ALL = "all machines"
LEAST_CASES = 20
BAR = 0.10


def main() -> None:
    arguments = _arguments()
    keys = [f"{name}/{number}" for number in range(arguments.searches) for name in MACHINES]
    cases = done_rows([(stated, key) for key in keys], arguments.rows, arguments.processes)
    rows = [row for name, of_machine in _by_machine(cases) for row in deciles(name, of_machine)]
    finish(rows, checks(rows))


def stated(key: str) -> dict[str, Any]:
    """Return what a search stated of its winner, and what is true: "quiet/17"."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    name, number = key.split("/")
    found = search(_workload(name, int(number)), TRIALS, MACHINES[name], seed=int(number))
    show(f"{key}: {found.confidence}, {found.is_fastest}")
    return {"machine": name, "stated": found.confidence, "right": found.is_fastest, "named": found.is_named}


def _workload(machine: str, number: int) -> SimulatedWorkload:
    if machine == OTHER_FORMS:
        return machine_job(FIRST_SEED + number, LEVELS[number % len(LEVELS)])
    small = [workload for workload in workloads(WORKLOADS) if workload.devices <= MOST_DEVICES]
    return replace(small[number % len(small)], seed=number)


def _by_machine(cases: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Mapping[str, Any]]]]:
    for name in MACHINES:
        yield name, [case for case in cases if case["machine"] == name]
    yield ALL, [*cases]


def deciles(name: str, cases: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each tenth of the stated probabilities in which there are winners."""
    known = [case for case in cases if case["stated"] is not None]
    rows = []
    for decile in range(10):
        inside = [case for case in known if min(int(10 * case["stated"]), 9) == decile]
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
        for name in (*MACHINES, ALL)
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--searches", type=int, default=300, help="searches on each kind of machines")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=Path, default=Path("certainty.jsonl"), help="what is done; goes on from there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
