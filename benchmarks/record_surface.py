"""Records a surface: plans of the example, each run for real on two ranks, appended to a file run by run.

    python -m benchmarks.record_surface [--out FILE] [--plans 320] [--rounds 1]

A file that exists goes on where it ended: with its own profile, plans and settings. Each round runs every plan once, in
an order of its own, so that a drift of the machine meets the plans by chance.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from autotune.prediction.predictor import Predictor
from autotune.search.execution.profiling import profile_layers
from autotune.search.execution.runner import Runner
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import feasible_space
from autotune.search.space.space import Space
from autotune.workload import Prepared
from benchmarks.prediction import example
from benchmarks.surface import FOLDER, Header, Run, lengths_of, read_surface
from trials import plugins, wire
from trials.data.packers import PACKERS
from trials.launchers.local import LocalLauncher
from trials.outcome import Rejected
from trials.plan import Plan
from trials.run.pool import WarmPool

_TIMED_STEPS = 2
_SHIFTED = 0.6
"""Share of the plans that are not the solver's own."""
_SHIFTS = (-2, -1, -1, 0, 0, 0, 1, 1, 2)
_SLACKS = {"qv_slack": (0, 1, 2), "qt_slack": (0, 32, 64, 128, 256)}


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        prepared = example(Path(folder), arguments.samples, search={"timed_steps": _TIMED_STEPS})
        with WarmPool(LocalLauncher(Path(folder) / "ranks", 2, "cpu")) as pool:
            if not arguments.out.exists():
                arguments.out.write_text(wire.encode(_header(prepared, pool, Path(folder))) + "\n")
            header, runs = read_surface(arguments.out)
            assert header.lengths == lengths_of(prepared.index), "recorded with another --samples"
            assert header.workload.hardware == prepared.workload.hardware, "recorded on other hardware"
            predictor = CalibratedPredictor(
                Predictor(header.costs, prepared.epoch, header.workload.model.element_bytes)
            )
            runner = Runner(prepared, predictor, pool)
            plans = _plans(header, predictor, runner, arguments.plans)
            done = Counter(run.plan for run in runs)
            for number in range(arguments.rounds):
                for plan in _shuffled(plans, number):
                    if done[plan] <= number:
                        run = _run(runner, plan)
                        done[plan] += 1
                        with arguments.out.open("a") as file:
                            file.write(wire.encode(run) + "\n")
                        print(f"run {done.total()}: {run.ended - run.began:.1f} s", file=sys.stderr, flush=True)


def _header(prepared: Prepared, pool: WarmPool, folder: Path) -> Header:
    return Header(
        workload=prepared.workload,
        costs=profile_layers(prepared, pool, folder / "ranks"),
        weights=prepared.weights,
        seed=prepared.job.training.seed,
        warmup_steps=prepared.job.search.warmup_steps,
        lengths=lengths_of(prepared.index),
    )


def _plans(header: Header, predictor: CalibratedPredictor, runner: Runner, count: int) -> list[Plan]:
    """Distinct ones that are worth a run: every second at the solver's split, the others at any point of the space."""
    model = header.workload.model
    limits = Limits(
        vision_layers=model.vision_layers,
        language_layers=model.language_layers,
        memory_limit_bytes=header.workload.memory_limit_bytes,
    )
    space = feasible_space(header.workload, Solver(predictor.base, limits), remedy="give more memory")
    found: dict[str, Plan] = {}
    for plan in _drawn(space):
        if runner.rejection(plan) is None:
            found[plan.id] = plan
        if len(found) == count:
            return list(found.values())
    raise AssertionError("the space is endless")


def _drawn(space: Space) -> Iterator[Plan]:
    chance = random.Random(0)
    while True:
        point = dict(space.point(chance.choice(space.starts)) or {})
        point["packer"] = chance.choice(plugins.names(PACKERS))
        if chance.random() < _SHIFTED:
            point |= {name: chance.choice(values) for name, values in _SLACKS.items()}
            point |= {name: chance.choice(_SHIFTS) for name in point if name.startswith(("boundary_", "recompute_"))}
        yield space.plan(point)


def _shuffled(plans: list[Plan], number: int) -> list[Plan]:
    return random.Random(number).sample(plans, len(plans))


def _run(runner: Runner, plan: Plan) -> Run:
    began = time.time()
    outcome = runner.run(plan).outcome
    assert not isinstance(outcome, Rejected)
    return Run(plan=plan, outcome=outcome, began=began, ended=time.time())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER / "tiny-internvl.jsonl")
    parser.add_argument("--plans", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--samples", type=int, default=400, help="of the example's data")
    return parser.parse_args()


if __name__ == "__main__":
    main()
