"""Searches on simulated machines of another form than the product's predictions. Prints one JSON object.

    python -m benchmarks.other_forms [--machines 20] [--level 1.0] [--form plain] [--seeds held-out] [--processes 2]
        [--rows FILE]

What is done is kept in a file of rows, and a run that was ended goes on from there; rows of several levels and seeds
may share a file.

Each seed of `benchmarks/machines` is a job on a machine whose kernels, links and pipeline are simulated by other
formulas than the product's. A search gets the fitted profile of the machine's layers, wrong by a factor of 1.3 each at
level 1, and answers to trials. Regret is how much longer an epoch truly takes under the plan that a search would choose
after a number of trials than under the fastest plan known, from a search on true times or any of the searches.

With `--form stalls` ranks decode their samples as well, with workers or without; with `--form memory` each stage needs
5 % more or less than predicted.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from benchmarks.certainty import OTHER_FORMS, deciles
from benchmarks.machines.best import best_plan
from benchmarks.machines.jobs import DEVELOPMENT, FORMS, HELD_OUT, MachineJob, machine_job
from benchmarks.output.result import Check, at_most, finish, show
from benchmarks.output.rows import done_rows
from benchmarks.references.samplers import other_search
from benchmarks.search import search

TRIALS = 24
AFTER = (12, 24)
"""Trials after which regret is stated."""
RIVALS = ("tpe", "gp", "uniform", "predicted")
OURS = "model"
SEEDS = {"development": DEVELOPMENT, "held-out": HELD_OUT}
BARS = {1.0: {12: (0.015, 0.04), 24: (0.007, 0.02)}, 0.5: {12: (0.007, 0.02)}}
"""By level and trials: most regret at the median, and at the 90th percentile."""
STALLS = (0.02, 0.05)
"""Most regret of the winners where loading stalls, at the median and at the 90th percentile."""
OUT_OF_MEMORY = (1.0, 3.0)
"""Most trials of a search that run out of memory where 5 % of it is noise, on average and at most."""
LEFT = 0.01
"""Gain that a search should not leave."""
LEAVING = 0.05
"""Most share of the searches that end by themselves and leave it."""


def ours(key: str) -> dict[str, Any]:
    """Return a row with the product's search, and the best plan by true times."""
    job = _job(key)
    found = search(job, TRIALS, seed=job.seed, go_on=True)
    best = best_plan(job)
    return {
        "machine": job.name,
        "dials": asdict(job.dials),
        "known": min(job.machine.epoch_seconds(best), found.fastest_tried),
        "best_stages": best.layout.pipeline,
        "stages": found.degrees,
        "out_of_memory": found.out_of_memory,
        "own_error_of_the_best": job.machine.structure.own_factor(best) - 1,
        "best_so_far": {OURS: found.best_so_far},
        "winner": found.seconds,
        "after_the_rest": found.after_the_rest,
        "stated": found.confidence,
        "right": found.is_fastest,
        "named": found.is_named,
    }


def rivals(key: str) -> dict[str, Any]:
    """Return a row with the other samplers on the same machine."""
    job = _job(key)
    found = {name: other_search(job, name, TRIALS, seed=job.seed) for name in RIVALS}
    return {
        "machine": job.name,
        "known": min(each.fastest_tried for each in found.values()),
        "best_so_far": {name: each.best_so_far for name, each in found.items()},
    }


def _job(key: str) -> MachineJob:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    level, seed, *form = key.split("/")
    show(key)
    return machine_job(int(seed), float(level), *form)


# --- regrets ---


def with_regrets(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with regrets by sampler: those of a machine have one fastest plan known."""
    known: dict[str, float] = {}
    for row in rows:
        known[row["number"]] = min(row["known"], known.get(row["number"], math.inf))
    return [
        {
            **row,
            "regrets": {
                name: [seconds / known[row["number"]] - 1 for seconds in of_trials]
                for name, of_trials in row["best_so_far"].items()
            },
            **({"winner_regret": row["winner"] / known[row["number"]] - 1} if "winner" in row else {}),
        }
        for row in rows
    ]


def after(row: Mapping[str, Any], name: str, trials: int) -> float:
    """Return the regret after this number of trials, or after the last one of a search that had fewer."""
    regrets = row["regrets"][name]
    return float(regrets[min(trials, len(regrets)) - 1])


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the regrets of each sampler: median and 90th percentile over the machines."""
    found = []
    for name in (OURS, *RIVALS):
        of_name = [row for row in rows if name in row["regrets"]]
        for trials in AFTER:
            regrets = [after(row, name, trials) for row in of_name]
            if regrets:
                median, high = (float(np.quantile(regrets, share)) for share in (0.5, 0.9))
                found.append(
                    {"sampler": name, "trials": trials, "machines": len(regrets), "median": median, "90th": high}
                )
    return found


def form_checks(form: str, rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Return the checks of a form besides the plain one."""
    found = [row for row in rows if OURS in row["regrets"]]
    if form == "stalls":
        regrets = [row["winner_regret"] for row in found]
        values = [[float(np.quantile(regrets, share))] if regrets else [] for share in (0.5, 0.9)]
        names = "regret of the winner, median", "regret of the winner, 90th percentile"
        return [at_most(*each) for each in zip(names, values, STALLS, strict=True)]
    if form == "memory":
        counts = [row["out_of_memory"] for row in found]
        mean, most = OUT_OF_MEMORY
        return [
            at_most("trials out of memory of a search, mean", [float(np.mean(counts))] if counts else [], mean),
            at_most("trials out of memory of a search, most", counts, most),
        ]
    return []


def checks(level: float, rows: Sequence[Mapping[str, Any]]) -> list[Check]:
    found = [row for row in rows if OURS in row["regrets"]]
    bars = [
        at_most(f"regret after {trials} trials, {what}", _quantile(found, trials, share), bar)
        for trials, both in BARS.get(level, {}).items()
        for what, share, bar in zip(("median", "90th percentile"), (0.5, 0.9), both, strict=True)
    ]
    ended = [row for row in found if row["after_the_rest"] is not None]
    gained = [row["winner"] / row["after_the_rest"] - 1 > LEFT for row in ended]
    missed = [row["winner_regret"] > LEFT for row in ended]
    return [
        *bars,
        at_most(f"searches that ended by themselves and would have gained {LEFT:.0%}, share", _mean(gained), LEAVING),
        at_most(f"searches that ended by themselves {LEFT:.0%} above the best plan, share", _mean(missed), LEAVING),
    ]


def _quantile(rows: Sequence[Mapping[str, Any]], trials: int, share: float) -> list[float]:
    regrets = [after(row, OURS, trials) for row in rows]
    return [float(np.quantile(regrets, share))] if regrets else []


def _mean(values: Sequence[bool]) -> list[float]:
    """Return the share of True; 0 where no search ended by itself."""
    return [float(np.mean(values)) if values else 0.0]


def main() -> None:
    arguments = _arguments()
    seeds = SEEDS[arguments.seeds][: arguments.machines]
    form = "" if arguments.form == "plain" else f"/{arguments.form}"
    keys = [f"{arguments.level:g}/{seed}{form}" for seed in seeds]
    tasks = [*((ours, key) for key in keys), *((rivals, key) for key in keys[: arguments.rivals])]
    rows = with_regrets(done_rows(tasks, arguments.rows, arguments.processes))
    certainty = deciles(OTHER_FORMS, [row for row in rows if "stated" in row])
    held = form_checks(arguments.form, rows) or checks(arguments.level, rows)
    finish([*rows, *table(rows), *certainty], held)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=20, help="number of seeds, from the first")
    parser.add_argument("--rivals", type=int, default=20, help="machines that other samplers search too")
    parser.add_argument("--level", type=float, default=1.0, help="of all distortions: 0 for none, 1 for a GPU's")
    parser.add_argument("--form", choices=FORMS, default="plain", help="stalls of loading, or noise of memory")
    parser.add_argument("--seeds", choices=SEEDS, default="held-out", help="tune on those of development alone")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rows", type=Path, default=Path("other-forms.jsonl"), help="what is done; goes on from there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
