"""Searches among the plans of a recorded surface."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import optuna

from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.sampling.advisor import Advisor
from autotune.search.sampling.context import SamplerContext
from autotune.search.sampling.proposals import SAMPLERS
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from benchmarks.surfaces.surface import Surface, recorded_space
from trials import plugins
from trials.plan import Plan


def replayed(name: str, surface: Surface, trials: int, seed: int) -> list[float]:
    """Return the regret after each trial of a search among the recorded plans; "model" is ours."""
    predictor, run = CalibratedPredictor(surface.predictor), surface.replay(seed)
    # Any recorded plan may be chosen, also one whose steps an arrangement of today would not keep near the batch.
    predictor.learning_faults = lambda _: ()
    limits = Limits.of(surface.workload)
    space = recorded_space(surface, Solver(surface.predictor, limits))
    advisor = Advisor(space, predictor, limits, surface.settings)
    context = SamplerContext(space=space, advisor=advisor, seed=seed)
    plans = grid(space.starts, seed) if name == "grid" else None
    study = optuna.create_study(sampler=None if plans else plugins.load(SAMPLERS, name).sampler(context))
    measured: dict[Plan, float] = {}
    regrets: list[float] = []
    for number in range(trials):
        trial = study.ask(space.distributions) if plans is None else None
        plan = space.plan(trial.params) if trial else next(plans or iter(()))
        done = run(plan, number)
        seconds = done.result.epoch_seconds
        if trial is not None:
            study.tell(trial, seconds if seconds is not None else 2 * predictor.epoch_seconds(plan))
        if seconds is not None:
            measured[plan] = min(seconds, measured.get(plan, math.inf))
        advisor.learn(done)
        fastest = min(measured, key=lambda plan: measured[plan], default=None)
        chosen = advisor.best() if name == "model" else fastest
        regrets.append(surface.epoch_seconds[chosen] / surface.best_seconds - 1 if chosen else math.inf)
    return regrets


def grid(starts: Sequence[Plan], seed: int) -> Iterator[Plan]:
    """Return the plans in random order."""
    order = np.random.default_rng(seed).permutation(len(starts))
    return iter([starts[number] for number in order])
