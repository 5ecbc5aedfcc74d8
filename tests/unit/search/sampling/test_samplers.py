"""Every sampler suggests plans that can be trained, and nothing else."""

from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.sampling.advisor import Advisor
from autotune.search.sampling.context import Nearest, SamplerContext
from autotune.search.sampling.proposals import SAMPLERS, load_sampler
from autotune.search.space.space import Space
from tests.machines.simulated import Behaviour, SimulatedLauncher
from tests.values.parameters import parameters
from tests.values.search import axes_of, finished, limits_of, predictor_of, runner_of, solver_of
from trials import plugins
from trials.job import SearchSection
from trials.plan import Layout, Padded, Plan
from trials.stage import Stage

PREDICTOR = predictor_of()
LIMIT = round(1.4 * solver_of(1, PREDICTOR).least_bytes(Padded(samples=2), Layout(pipeline=2, data=1, zero=0)))
SOLVER = solver_of(LIMIT, PREDICTOR)
SPACE = Space(axes_of(), SOLVER)
NAMES = ("exhaustive", "gp", "model", "tpe", "uniform")
BASELINE = Plan(
    packing=Padded(samples=4),
    layout=Layout(pipeline=1, data=2, zero=0),
    stages=(Stage(vision=5, language=4, recompute_vision=5, recompute_language=4),),
)


def advisor_of(space: Space = SPACE) -> Advisor:
    return Advisor(space, CalibratedPredictor(PREDICTOR), limits_of(LIMIT), SearchSection(timed_steps=2))


def study_of(name: str, seed: int = 0, advisor: Advisor | None = None) -> optuna.Study:
    advisor = advisor or advisor_of()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    context = SamplerContext(space=advisor.space, advisor=advisor, seed=seed)
    return optuna.create_study(sampler=load_sampler(name).sampler(context))


def suggested(name: str, count: int = 5, seed: int = 0) -> list[dict[str, Any]]:
    """Return the points of consecutive trials that end as predicted."""
    study, found = study_of(name, seed), []
    for _ in range(count):
        trial = study.ask(SPACE.distributions)
        study.tell(trial, PREDICTOR.epoch_seconds(SPACE.plan(trial.params)))
        found.append(trial.params)
    return found


def test_these_are_all_samplers() -> None:
    assert plugins.names(SAMPLERS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_suggestion_is_the_point_of_a_plan_that_can_be_trained(name: str) -> None:
    for point in suggested(name):
        plan = SPACE.plan(point)
        assert SOLVER.admits(plan)
        assert SPACE.point(plan) == point


@pytest.mark.parametrize("name", parameters({name: name for name in NAMES}, short=("model", "tpe", "uniform")))
def test_the_same_seed_suggests_the_same(name: str) -> None:
    assert suggested(name, 4, seed=1) == suggested(name, 4, seed=1)


@pytest.mark.parametrize(
    "name", parameters({name: name for name in ("gp", "tpe", "uniform")}, short=("tpe", "uniform"))
)
def test_another_seed_suggests_something_else(name: str) -> None:
    assert suggested(name, 3, seed=1) != suggested(name, 3, seed=2)


@pytest.mark.parametrize("name", [pytest.param("gp", marks=pytest.mark.long), "tpe"])
def test_optunas_samplers_choose_all_parameters_together_when_some_trials_have_none(name: str) -> None:
    """Baselines are no points of the space."""
    study = study_of(name)
    study.add_trial(optuna.trial.create_trial(value=1.0, params={}, distributions={}))
    for number, plan in enumerate(SPACE.starts[:3]):
        point = SPACE.point(plan)
        assert point is not None
        study.add_trial(optuna.trial.create_trial(value=9.0 + number, params=point, distributions=SPACE.distributions))
    nearest = study.sampler
    assert isinstance(nearest, Nearest)
    with pytest.MonkeyPatch.context() as patch:

        def alone(*_: object) -> None:
            raise AssertionError("a parameter was drawn on its own")

        patch.setattr(nearest._sampler, "sample_independent", alone)
        assert SPACE.plan(study.ask(SPACE.distributions).params)


def test_open_trials_of_the_model_have_plans_of_their_own() -> None:
    study = study_of("model")
    plans = [SPACE.plan(study.ask(SPACE.distributions).params) for _ in range(5)]
    assert len(set(plans)) == 5


def test_the_model_suggests_a_plan_of_the_space_even_if_a_baseline_is_best_and_none_is_left() -> None:
    two_stages = (Layout(pipeline=2, data=1, zero=0),)
    space = Space(axes_of(layouts=two_stages, boundaries=(5, 9), recompute="all", capacities=((9, 480),)), SOLVER)
    assert space.starts
    advisor = advisor_of(space)
    launcher = SimulatedLauncher(PREDICTOR, Behaviour(noise=0.0))
    result = runner_of(Path(), launcher, predictor=PREDICTOR, timed_steps=2).run(BASELINE)
    assert result.epoch_seconds is not None
    advisor.learn(finished(BASELINE, result.outcome, epoch_seconds=result.epoch_seconds))
    study = study_of("model", advisor=advisor)
    points = [study.ask(space.distributions).params for _ in range(12)]
    assert advisor.propose([space.plan(point) for point in points]) is None
    assert all(SOLVER.admits(space.plan(point)) for point in points)


def test_the_exhaustive_sampler_suggests_every_start_and_then_their_neighbours_once() -> None:
    near = dict.fromkeys(each for plan in SPACE.starts for each in SPACE.neighbours(plan))
    expected = [*SPACE.starts, *near][: len(SPACE.starts) + 5]
    study = study_of("exhaustive")
    plans = [SPACE.plan(study.ask(SPACE.distributions).params) for _ in expected]
    assert plans == expected
