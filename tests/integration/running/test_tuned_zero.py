"""Searches among plans with ZeRO 2 and 3 on two real ranks, with a memory limit that ZeRO 1 exceeds."""

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune import tune
from autotune.events import TrialEnded
from autotune.prediction.predictor import Predictor
from autotune.search.execution.runner import Runner
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.roles import Role
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import feasible_space
from autotune.workload import Prepared, prepare
from storage.database.url import default_url
from tests.values.training import job_of, plan_of, prepared_of, train
from trials.costs.layer_costs import LayerCosts
from trials.job import SpaceSection
from trials.outcome import Completed, OutOfMemory
from trials.plan import Layout, Padded, ZeroStage
from trials.run.pool import WarmPool
from trials.tasks.request import Trial

BATCH = {"global_batch_samples": 8}


def solver_of(prepared: Prepared, costs: LayerCosts) -> Solver:
    return Solver(Predictor(costs, prepared.epoch, prepared.workload.model.element_bytes), Limits.of(prepared.workload))


def least_bytes(solver: Solver, prepared: Prepared, zero: ZeroStage) -> float:
    """Return the bytes of the leanest plan of one stage that a search may run."""
    named = SpaceSection(layouts=(f"p1-d2-z{zero}",))
    space = feasible_space(prepared.workload, solver, remedy="", wanted=named)
    return min(solver.least_bytes(plan.packing, plan.layout) for plan in space.starts)


@pytest.mark.ranks
@pytest.mark.parametrize("zero", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_trial_is_measured_and_corrects_the_prediction(
    zero: ZeroStage, prepared: Prepared, pool: WarmPool, costs: LayerCosts
) -> None:
    plan = plan_of("12+8", data=2, zero=zero)
    predictor = CalibratedPredictor(Predictor(costs, prepared.epoch, prepared.workload.model.element_bytes))
    before = predictor.epoch_seconds(plan)
    outcome = Runner(prepared, predictor, pool).run(plan).outcome
    assert isinstance(outcome, Completed), outcome
    predictor.observe(plan, outcome.measurement, prepared.job.search.warmup_steps)
    assert predictor.trials == 1
    assert predictor.epoch_seconds(plan) != before
    (predicted,) = predictor.base.predict(plan).stage_bytes
    assert max(rank.peak_bytes for rank in outcome.measurement.stages) <= 1.02 * predicted


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.usefixtures("home")
def test_a_search_finds_a_plan_with_zero_3_where_zero_1_lacks_the_memory_and_trains_it(
    shallow: Path, tmp_path: Path, costs: LayerCosts, pool: WarmPool, give_profile: Callable[..., None]
) -> None:
    ample = prepared_of(shallow, tmp_path / "ample", training=BATCH)
    solver = solver_of(ample, costs)
    shared, further, whole = (least_bytes(solver, ample, zero) for zero in (3, 2, 1))
    assert shared < further < whole
    limit = round((shared + further) / 2 / 0.97)
    give_profile(default_url(), example=shallow)
    few = {"trials": 3, "warmup_steps": 0, "timed_steps": 1, "confirm_rounds": 1, "final_steps": 0}
    layouts = [f"p1-d2-z{zero}" for zero in (0, 1, 2, 3)]
    search = {**few, "space": {"layouts": layouts, "sequence": ["1"]}}
    heard: list[object] = []
    job = job_of(shallow, tmp_path / "output", search=search, training=BATCH, hardware={"memory_limit": f"{limit}B"})
    best = tune(job, listener=heard.append)
    assert best.plan.layout == Layout(pipeline=1, data=2, zero=3)
    done = [event.trial for event in heard if isinstance(event, TrialEnded)]
    measured = [trial for trial in done if isinstance(trial.result.outcome, Completed)]
    assert {trial.plan.layout.zero for trial in measured} == {3}
    for trial in measured:
        assert isinstance(trial.result.outcome, Completed)
        assert max(rank.peak_bytes for rank in trial.result.outcome.measurement.stages) <= limit
    usual = [trial.plan for trial in done if trial.role == Role.ZERO3]
    assert [plan.packing for plan in usual] == [Padded(samples=1)]
    prepared = prepare(job, tmp_path / "prepared")
    assert train(pool, prepared, best.plan, max_steps=1).steps == 1
    leanest = solver.leanest(best.plan.packing, Layout(pipeline=1, data=2, zero=1))
    steps = prepared.epoch(leanest.packing, 2).steps
    answer = pool.ask(prepared.request(leanest, Trial(warmup_steps=(), timed_steps=tuple(range(steps)))), 120)
    assert isinstance(answer, OutOfMemory)


def test_where_memory_does_not_lack_no_trial_is_spent_on_them(prepared: Prepared, costs: LayerCosts) -> None:
    said: list[str] = []
    space = feasible_space(prepared.workload, solver_of(prepared, costs), remedy="", show=said.append)
    assert {plan.layout.zero for plan in space.starts} <= {0, 1}
    (reason,) = (text for text in said if "ZeRO" in text)
    # Either they save nothing, or they are already slower by the times of this profile.
    assert reason.startswith("ZeRO 0 and 1 are best and the only stages that are searched: ")
