"""Records a surface: plans of a job, each run for real on two ranks, appended to a file run by run.

    python -m benchmarks.surfaces.record FILE [--plans 210] [--rounds 20] [--fastest 16]

The job is that of `pages`, with another model and other data than the example, on which the search was tuned.

The first round runs every plan once, each further one the plans that were fastest so far: regret depends on them.
Each round has an order of its own, so that a drift of the machine meets the plans by chance. A file that exists is
continued, with its own profile, plans and settings.
"""

import argparse
import heapq
import random
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from autotune.job_file import load_job
from autotune.prediction.predictor import Predictor
from autotune.search.execution.profiling import profile_layers
from autotune.search.execution.runner import Runner, estimate_epoch
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import feasible_space
from autotune.search.space.space import Space
from autotune.workload import Prepared, prepare
from benchmarks.cases import pages
from benchmarks.output.result import show
from benchmarks.surfaces.surface import Header, RecordedPacks, Run, lengths_of, read_surface
from trials import plugins, wire
from trials.data.packers import PACKERS
from trials.launchers.local import LocalLauncher
from trials.outcome import Completed, Rejected
from trials.plan import Packing, Plan
from trials.run.pool import WarmPool

_TIMED_STEPS = 2
_SHIFTED = 0.6
"""Share of the plans that are not the solver's own."""
_SHIFTS = (-2, -1, -1, 0, 0, 0, 1, 1, 2)
_SLACKS = {"qv_slack": (0, 1, 2), "qt_slack": (0, 32, 64, 128, 256)}


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        prepared, file = _prepared(Path(folder), arguments.samples), arguments.file
        with WarmPool(LocalLauncher(Path(folder) / "ranks", 2, "cpu")) as pool:
            if not file.exists():
                file.write_text(wire.encode(_header(prepared, pool, Path(folder))) + "\n")
            header, runs = read_surface(file)
            assert header.lengths == lengths_of(prepared.index), "recorded with another --samples"
            assert header.workload.hardware == prepared.workload.hardware, "recorded on other hardware"
            predictor = CalibratedPredictor(
                Predictor(header.costs, prepared.epoch, header.workload.model.element_bytes)
            )
            runner = Runner(prepared, predictor, pool)
            plans = _plans(header, predictor, runner, arguments.plans)
            for number in range(arguments.rounds):
                done = Counter(run.plan for run in runs)
                of_round = _fastest(runs, predictor.base, arguments.fastest) if number else plans
                for plan in _shuffled(of_round, number):
                    if done[plan] <= number:
                        run = _run(runner, plan)
                        if all(_packs_of(run.plan) != _packs_of(other.plan) for other in runs):
                            run = replace(run, packs=RecordedPacks.of(prepared.epoch(*_packs_of(plan))))
                        runs.append(run)
                        with file.open("a") as lines:
                            lines.write(wire.encode(run) + "\n")
                        show(f"run {len(runs)}: {run.ended - run.began:.1f} s")


def _prepared(folder: Path, samples: int) -> Prepared:
    job = load_job(pages.make_job(folder, samples))
    search = job.search.model_copy(update={"timed_steps": _TIMED_STEPS})
    return prepare(job.model_copy(update={"search": search}), folder / "work")


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
    """Return distinct plans worth a run: every second at the solver's split, the others anywhere in the space."""
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


def _fastest(runs: Sequence[Run], predictor: Predictor, count: int) -> list[Plan]:
    """Return the plans whose runs so far took least, at the median."""
    seconds: dict[Plan, list[float]] = defaultdict(list)
    for run in runs:
        if isinstance(run.outcome, Completed):
            seconds[run.plan].append(estimate_epoch(run.outcome.measurement, predictor.predict(run.plan))[0])
    return heapq.nsmallest(count, seconds, key=lambda plan: median(seconds[plan]))


def _drawn(space: Space) -> Iterator[Plan]:
    chance = random.Random(0)
    while True:
        point = dict(space.point(chance.choice(space.starts)) or {})
        point["packer"] = chance.choice(plugins.names(PACKERS))
        if chance.random() < _SHIFTED:
            point |= {name: chance.choice(values) for name, values in _SLACKS.items()}
            point |= {name: chance.choice(_SHIFTS) for name in point if name.startswith(("boundary_", "recompute_"))}
        yield space.plan(point)


def _packs_of(plan: Plan) -> tuple[Packing, int]:
    return plan.packing, plan.layout.data


def _shuffled(plans: list[Plan], number: int) -> list[Plan]:
    return random.Random(number).sample(plans, len(plans))


def _run(runner: Runner, plan: Plan) -> Run:
    began = time.time()
    outcome = runner.run(plan).outcome
    assert not isinstance(outcome, Rejected)
    return Run(plan=plan, outcome=outcome, began=began, ended=time.time())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="in benchmarks/surfaces; one for each machine")
    parser.add_argument("--plans", type=int, default=210)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--fastest", type=int, default=16, help="plans of the rounds after the first")
    parser.add_argument("--samples", type=int, default=400, help="of the job's data")
    return parser.parse_args()


if __name__ == "__main__":
    main()
