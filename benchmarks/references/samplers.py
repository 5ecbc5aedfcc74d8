"""Searches by other samplers, on the same space with the same trials."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import optuna

from autotune.search.execution.runner import Runner
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.sampling.advisor import Advisor
from autotune.search.sampling.context import SamplerContext
from autotune.search.sampling.proposals import SAMPLERS
from autotune.search.space.space import Space
from benchmarks.cases.workloads import NOISY, SimulatedWorkload
from benchmarks.surfaces.replay import grid
from tests.machines.simulated import SimulatedLauncher, Undisturbed
from trials import plugins
from trials.outcome import Completed
from trials.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """What one search of another sampler came to."""

    best_so_far: tuple[float, ...]
    """True seconds of the plan that measured fastest after each trial; infinite while nothing was measured."""
    fastest_tried: float
    """True seconds of the fastest plan that ran."""


def other_search(workload: SimulatedWorkload, name: str, trials: int, seed: int = 0) -> Rival:
    """Search with one of Optuna's samplers, or with the solver's plans: `grid` at random, `predicted` in order."""
    launcher = workload.launcher(NOISY, seed)
    prepared = workload.prepared(trials=trials)
    predictor = CalibratedPredictor(workload.predictor)
    runner = Runner(prepared, predictor, launcher, Undisturbed)
    space = workload.space(workload.predictor)
    plans = _solved(name, space, predictor, seed)
    advisor = Advisor(space, predictor, workload.limits(workload.memory_limit_bytes), prepared.job.search)
    context = SamplerContext(space=space, advisor=advisor, seed=seed)
    study = optuna.create_study(sampler=None if plans else plugins.load(SAMPLERS, name).sampler(context))
    measured: dict[Plan, float] = {}
    best_so_far: list[float] = []
    for _ in range(trials):
        trial = study.ask(space.distributions) if plans is None else None
        plan = space.plan(trial.params) if trial else next(plans or iter(()), None)
        if plan is None:
            break
        result = runner.run(plan)
        if isinstance(result.outcome, Completed) and result.epoch_seconds is not None:
            measured[plan] = min(result.epoch_seconds, measured.get(plan, math.inf))
        if trial is not None:
            predicted = predictor.epoch_seconds(plan)
            study.tell(trial, result.epoch_seconds if result.epoch_seconds is not None else 2 * predicted)
        chosen = min(measured, key=lambda plan: measured[plan], default=None)
        best_so_far.append(launcher.epoch_seconds(chosen) if chosen else math.inf)
    return Rival(best_so_far=tuple(best_so_far), fastest_tried=fastest_fitting(workload, launcher))


def fastest_fitting(workload: SimulatedWorkload, launcher: SimulatedLauncher) -> float:
    """Return the true seconds of the fastest plan that was asked for and fits."""
    return min((launcher.epoch_seconds(plan) for plan in launcher.asked if workload.fits(plan)), default=math.inf)


def _solved(name: str, space: Space, predictor: CalibratedPredictor, seed: int) -> Iterator[Plan] | None:
    match name:
        case "grid":
            return grid(space.starts, seed)
        case "predicted":
            return iter(sorted(space.starts, key=predictor.epoch_seconds))
        case _:
            return None
