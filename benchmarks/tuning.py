"""What a real tuning of the example spends its time on, and trials on warm and on fresh ranks. Prints one JSON object.

    python -m benchmarks.tuning [--samples 400] [--trials 14]

Tunes the example on two ranks with its profile known: the share of the time that is spent neither in timed nor in
warm-up steps. Then runs plans in turns on ranks that stay alive, on ranks of their own, and so that they fail for want
of memory.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autotune.events import Event, Note, TrialEnded
from autotune.machine.agent import Agent
from autotune.prediction.predictor import Predictor
from autotune.search.execution.ledger import duration_seconds, ran
from autotune.search.execution.profiling import layer_costs
from autotune.search.execution.runner import Runner
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import feasible_space
from autotune.search.tuner import Tuner
from autotune.workbench import Workbench
from autotune.workload import Prepared
from benchmarks.output.result import at_most, finish, show
from benchmarks.prediction import example
from storage.records import FinishedTrial
from storage.store import Store, open_store
from trials.launchers.local import LocalLauncher
from trials.outcome import Completed
from trials.plan import Plan
from trials.run.pool import REQUESTS_PER_START, WarmPool
from trials.sites.local import LocalSite

PLANS = 6


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepared = example(folder, arguments.samples, search={"trials": arguments.trials, "time_limit": "1h"})
        with open_store(f"sqlite:///{folder}/tuning.db") as store:
            with WarmPool(LocalLauncher(folder / "profile", 2, "cpu")) as pool:
                store.add_workload(prepared.workload)
                layer_costs(prepared, store, pool, folder / "profile")
            tuning = _tuning(prepared, store, folder / "tuning")
            rates = _rates(prepared, store, folder / "rates")
    share = tuning["share_beside_steps"]
    finish([tuning, rates], [at_most("share of a tuning that is not spent in steps", [share], 0.25)])


def _tuning(prepared: Prepared, store: Store, folder: Path) -> dict[str, Any]:
    trials: list[FinishedTrial] = []

    def listen(event: Event) -> None:
        match event:
            case TrialEnded(trial=trial):
                trials.append(trial)
                show(f"trial {trial.number}: {trial.role}, {trial.result.outcome.kind}")
            case Note(text=text):
                show(text)
            case _:
                pass

    began = time.perf_counter()
    with Agent(store) as agent:
        bench = Workbench(prepared=prepared, store=store, agent=agent, site=LocalSite("cpu"), folder=folder)
        best = Tuner(bench, listen).tune()
    seconds = time.perf_counter() - began
    done = [trial for trial in trials if ran(trial)]
    timed = sum(sum(_steps(trial)) for trial in done)
    warmup = sum(float(np.mean(_steps(trial))) * prepared.job.search.warmup_steps for trial in done if _steps(trial))
    return {
        "tuning_seconds": seconds,
        "trials": len(done),
        "share_beside_steps": 1 - (timed + warmup) / seconds,
        "share_beside_timed_steps": 1 - timed / seconds,
        "share_beside_trials": 1 - sum(map(duration_seconds, done)) / seconds,
        "roles": [trial.role for trial in trials],
        "confidence": best.confidence,
        "ties": list(best.ties),
        "gains": {baseline.role: baseline.gain for baseline in best.baselines},
    }


def _steps(trial: FinishedTrial) -> tuple[float, ...]:
    outcome = trial.result.outcome
    return outcome.measurement.step_seconds if isinstance(outcome, Completed) else ()


def _rates(prepared: Prepared, store: Store, folder: Path) -> Mapping[str, Any]:
    """Return the seconds of a trial, from request to result: on warm ranks, on fresh ones, and when it fails there."""
    model, limit = prepared.workload.model, prepared.workload.memory_limit_bytes
    with (
        WarmPool(LocalLauncher(folder / "warm", 2, "cpu")) as warm,
        WarmPool(LocalLauncher(folder / "fresh", 2, "cpu"), REQUESTS_PER_START["fresh"]) as fresh,
    ):
        predictor = Predictor(layer_costs(prepared, store, warm, folder), prepared.epoch, model.element_bytes)
        limits = Limits(
            vision_layers=model.vision_layers, language_layers=model.language_layers, memory_limit_bytes=limit
        )
        space = feasible_space(prepared.workload, Solver(predictor, limits), remedy="give more memory")
        plans = sorted(space.starts, key=predictor.epoch_seconds)[:PLANS]
        tight = replace(prepared, workload=replace(prepared.workload, memory_limit_bytes=1 << 20))
        runners = {
            name: Runner(job, CalibratedPredictor(predictor), pool)
            for name, job, pool in (("warm", prepared, warm), ("fresh", prepared, fresh), ("failed", tight, fresh))
        }
        runners["warm"].run(plans[0])  # starts its ranks
        seconds: dict[str, list[float]] = {name: [] for name in runners}
        for number, plan in enumerate(plans):
            for name in sorted(runners, reverse=number % 2 == 0):
                seconds[name].append(_timed(runners[name], plan))
    return {
        "trials_per_minute": {name: 60 / float(np.median(each)) for name, each in seconds.items()},
        "seconds": seconds,
    }


def _timed(runner: Runner, plan: Plan) -> float:
    began = time.perf_counter()
    runner.run(plan)
    return time.perf_counter() - began


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=400, help="of the example's data")
    parser.add_argument("--trials", type=int, default=14)
    return parser.parse_args()


if __name__ == "__main__":
    main()
