"""The solver against other ways to split and recompute, by simulated time over real packs. Prints one JSON object.

    python -m benchmarks.solver [--repeats 20] [--milp-seconds 5] [--cases 24]

Layer costs are those of an analytic device, see benchmarks/machines/analytic.py: nothing is measured on one. Times of
the solver are medians on one core, with the packs already made.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from itertools import pairwise, product
from typing import Any

import numpy as np

from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.solver.splits import WantedSplits
from benchmarks.cases.solver import Case, cases, paper_case, speed_cases
from benchmarks.machines.analytic import LABEL
from benchmarks.output.result import at_least, at_most, finish, show
from benchmarks.references.splits import Optimum, Program
from trials.model.cut import cut
from trials.plan import Plan

with redirect_stdout(sys.stderr):
    # It logs on what it prints to while it is imported.
    from deepspeed.runtime.utils import partition_balanced

CLOSED_FORM = "closed form"
NAMES = ("partition-balanced", "milp", "omnibal", CLOSED_FORM)
SECONDS = {"45 + 48 layers, 4 stages": 0.050, "90 + 110 layers, 32 stages": 1.0}
"""To solve at most."""
PUBLISHED = {"omnibal": (0, 23, 47, 72, 101), "by parameters": (0, 49, 66, 82, 101)}
"""Splits of a chain of 101 units in OmniBal's code."""
MEMORIES = (80, 64, 48, 40)
"""Gigabytes of a device."""
ROUNDING = 1 + 1e-9
Ends = tuple[int, ...]


def main() -> None:
    arguments = _arguments()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    speed = [_speed(size, case, arguments.repeats) for size, case in speed_cases()]
    rows = [_row(case, arguments) for case in list(cases())[: arguments.cases]]
    gains = {name: [row["gains"][name] for row in rows if name in row["gains"]] for name in NAMES}
    summary = {
        "costs": LABEL,
        "gains": {name: _spread(values) for name, values in gains.items()},
        "does_not_fit": {
            name: sum(name in row["does_not_fit"] for row in rows) for name in ("partition-balanced", "omnibal")
        },
    }
    checks = [
        at_most(f"seconds to solve, {size}", (row["seconds"] for row in speed if row["size"] == size), most)
        for size, most in SECONDS.items()
    ]
    for name, values in gains.items():
        checks.append(at_least(f"epoch seconds of {name} / ours", values, 1 / ROUNDING))
    checks.append(at_least("cases", [len(rows)], 20))
    finish([*speed, *rows, summary, *_reconstruction()], checks)


# --- how fast the solver is ---


def _speed(size: str, case: Case, repeats: int) -> dict[str, Any]:
    """Time the solver, with the packs of the epoch already made."""
    show(case.name)
    predictor = case.predictor()
    seconds = []
    for _ in range(repeats + 1):
        solver = case.solver(predictor)  # anew: it keeps its solutions
        start = time.perf_counter()
        plan = solver.solve(case.packing, case.layout)
        seconds.append(time.perf_counter() - start)
    # The first finds which packs are heaviest.
    timed = seconds[1:]
    return {
        "size": size,
        "room": case.room,
        "seconds": statistics.median(timed),
        "least_seconds": min(timed),
        "most_seconds": max(timed),
        "recomputed_layers": _recomputed(plan) if plan else None,
    }


def _recomputed(plan: Plan) -> int:
    return sum(stage.recompute_vision + stage.recompute_language for stage in plan.stages)


# --- how good its plans are ---


def _row(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    show(case.name)
    predictor = case.predictor()
    limits = case.tight_limits(predictor)
    solver = Solver(predictor, limits)
    plan = solver.solve(case.packing, case.layout)
    (best,) = solver.solutions(case.packing, case.layout, WantedSplits(count=1, within=1.0))
    assert plan is not None  # there is memory for the leanest plan
    sizes = predictor.sizes(case.packing, case.layout)
    program = Program(
        predictor.costs, sizes, case.layout, (limits.vision_layers, limits.language_layers), limits.usable_bytes
    )
    optimum = program.solve(element_bytes=2, time_limit=arguments.milp_seconds)
    proven = _proven(optimum, predictor, case, limits)
    others: dict[str, Plan | None] = {
        CLOSED_FORM: best,
        "partition-balanced": _balanced(predictor, solver, case),
        "milp": _plan(case, proven) if proven else None,
        "omnibal": _omnibal(predictor, solver, case),
    }
    seconds = {name: _epoch_seconds(predictor, plan) for name, plan in others.items() if plan is not None}
    ours = _epoch_seconds(predictor, plan)
    return {
        "case": case.name,
        "memory_gib": limits.memory_limit_bytes / (1 << 30),
        "units_spread": float(sizes.table[:, 0].std() / sizes.table[:, 0].mean()),
        "tokens_spread": float(sizes.table[:, 1].std() / sizes.table[:, 1].mean()),
        "steps": sizes.epoch.steps,
        "ours": {"seconds": ours, "stages": _stages(plan)},
        "others": {name: {"seconds": seconds[name], "stages": _stages(p)} for name, p in others.items() if p},
        "does_not_fit": [name for name, p in others.items() if p is None and name != "milp"],
        "milp_closed_form": proven.seconds / _closed_form(predictor, best) if proven else None,
        "gains": {name: of_other / ours for name, of_other in seconds.items()},
    }


def _proven(optimum: Optimum | None, predictor: Predictor, case: Case, limits: Limits) -> Optimum | None:
    """Return the optimum of the program, unless its tolerances let a stage pass the memory."""
    if optimum is None or not optimum.proven:
        return None
    needed = max(predictor.predict(_plan(case, optimum)).stage_bytes)
    return optimum if needed <= limits.usable_bytes * ROUNDING else None


def _plan(case: Case, optimum: Optimum) -> Plan:
    return Plan(packing=case.packing, layout=case.layout, stages=optimum.stages)


def _epoch_seconds(predictor: Predictor, plan: Plan) -> float:
    return predictor.predict(plan).epoch_seconds


def _closed_form(predictor: Predictor, plan: Plan) -> float:
    """Return the seconds of a step on the mean pack."""
    sizes = predictor.sizes(plan.packing, plan.layout)
    parts = Parts.of(cut(plan))
    forward, backward = predictor.times.pass_seconds(parts, plan.layout, sizes.mean)
    stages = (predictor.times.load_seconds(parts, sizes.mean) + forward + backward)[0]
    return float(stages.sum() + (sizes.epoch.micro_batches - 1) * stages.max())


def _balanced(predictor: Predictor, solver: Solver, case: Case) -> Plan | None:
    """Return DeepSpeed's split by times of layers; embedding, projector and head count with a neighbouring layer."""
    mean = predictor.sizes(case.packing, case.layout).mean
    each = Parts.of_layers(np.eye(5), *np.zeros((2, 5, 5)))
    forward, backward = predictor.times.pass_seconds(each, case.layout, mean)
    embedding, vision, projector, language, head = (forward + backward)[0].tolist()
    times = [vision] * case.vision.layers + [language] * case.language.layers
    times[0] += embedding
    times[case.vision.layers - 1] += projector
    times[-1] += head
    ends = tuple(int(end) for end in partition_balanced(times, case.layout.pipeline)[1:])
    return solver.fit_fewest(case.packing, case.layout, ends)


def _omnibal(predictor: Predictor, solver: Solver, case: Case) -> Plan | None:
    """Return the anchor's neighbour, with the fewest recomputed layers, that has the fastest epoch."""
    *inner, last = solver.forward_boundaries(case.packing, case.layout)
    moved = (
        (*(end + by for end, by in zip(inner, shift, strict=True)), last)
        for shift in product((-1, 0, 1), repeat=len(inner))
    )
    whole = (ends for ends in moved if all(start < end for start, end in pairwise((0, *ends))))
    plans = (solver.fit_fewest(case.packing, case.layout, ends) for ends in whole)
    fitting = [plan for plan in plans if plan is not None]
    return min(fitting, key=lambda plan: _epoch_seconds(predictor, plan), default=None)


def _spread(gains: list[float]) -> dict[str, float | int]:
    return {
        "cases": len(gains),
        "least": min(gains, default=math.nan),
        "median": statistics.median(gains or [math.nan]),
        "most": max(gains, default=math.nan),
    }


def _stages(plan: Plan) -> str:
    """Return the vision + language layers of each stage, with the recomputed ones in brackets."""
    return " ".join(f"{s.vision}+{s.language}({s.recompute_vision}+{s.recompute_language})" for s in plan.stages)


# --- OmniBal's model ---


def _reconstruction() -> Iterator[dict[str, Any]]:
    """Compare its published splits with those of this solver, on the analytic device."""
    case = paper_case(packs=32)
    predictor = case.predictor()
    for gigabytes in MEMORIES:
        solver = Solver(predictor, case.limits(gigabytes * 10**9))
        plans = {name: solver.fit(case.packing, case.layout, _ends(units)) for name, units in PUBLISHED.items()}
        ours = solver.solve(case.packing, case.layout)
        for name, plan in {"ours": ours, **plans}.items():
            yield {"reconstruction": case.name, "costs": LABEL, "gigabytes": gigabytes, "split": name} | (
                _told(predictor, plan) if plan else {"fits": False}
            )


def _told(predictor: Predictor, plan: Plan) -> dict[str, Any]:
    predicted = predictor.predict(plan)
    return {
        "stages": _stages(plan),
        "step_seconds": float(np.median(predicted.step_seconds)),
        "stage_gigabytes": [round(of_stage / 1e9, 1) for of_stage in predicted.stage_bytes],
    }


def _ends(units: tuple[int, ...]) -> Ends:
    """Return the boundaries of our 93 layers, from OmniBal's 101 units.

    Unit 0 turns to half precision, 1 embeds patches, 2 to 46 are the 45 vision layers, 47 projects, 48 embeds words, 49
    to 96 are the 48 language layers, 97 to 100 are transpose, norm, head and float32. Here the projector is with the
    last vision layer, and the head with the last language layer.
    """
    return tuple(min(max(end - 2, 0), 45) + min(max(end - 49, 0), 48) for end in units[1:])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20, help="of each timed solve")
    parser.add_argument("--milp-seconds", type=float, default=5.0)
    parser.add_argument("--cases", type=int, default=24, help="how many of the problems")
    return parser.parse_args()


if __name__ == "__main__":
    main()
