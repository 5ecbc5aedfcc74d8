"""Whole searches for a trainer, with simulated ranks."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import JobError, NoFeasiblePlan
from autotune.events import unheard
from autotune.machine.agent import Agent
from autotune.results.rival import Rival
from autotune.search.roles import BASELINES, REPEATS, Role
from autotune.search.space.abilities import Target
from autotune.search.space.feasible import feasible_space
from autotune.search.space.held import Holding
from autotune.search.space.space import Axes
from autotune.search.tuner import Tuner
from autotune.workbench import Workbench
from storage.store import open_store
from tests.machines.search_bench import MEMORY, PREDICTOR, Bench
from tests.machines.simulated import SimulatedLauncher
from tests.values.parameters import parameters
from tests.values.search import epoch_of, prepared_of, solver_of, target_of, workload_of
from trials import wire
from trials.outcome import OutOfMemory
from trials.plan import Layout, Packed, Plan
from trials.sites.local import LocalSite
from trials.stage import Stage

SWIFT, FACTORY = map(target_of, ("ms-swift", "llama-factory"))
PIPELINE = Plan(
    packing=Packed(qv=9, qt=480, qv_min=9, qt_min=416, packer="isf"),
    layout=Layout(pipeline=2, data=1, zero=0),
    stages=(Stage(vision=5, language=0), Stage(vision=0, language=4)),
)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        yield Bench(tmp_path, store, baseline_wins=False)


def holding(target: Target) -> Holding:
    return Holding(target, workload_of(), epoch_of())


def axes_for(target: Target) -> Axes:
    """Return the axes of a search for a trainer."""
    space = feasible_space(workload_of(), solver_of(MEMORY, PREDICTOR), remedy="", held=holding(target))
    return space.axes


@pytest.mark.parametrize(
    ("target", "sampler"),
    parameters(
        {
            f"{target.name}, {sampler}": (target, sampler)
            for target in (SWIFT, FACTORY)
            for sampler in ("model", "uniform")
        },
        short=("ms-swift, model",),
    ),
)
def test_beyond_the_baselines_only_plans_are_tried_that_the_trainer_can_hold(
    bench: Bench, target: Target, sampler: str
) -> None:
    study = bench.study()
    ledger = bench.search(study, SimulatedLauncher(PREDICTOR), axes=axes_for(target), trials=6, sampler=sampler)
    held = holding(target)
    searched = [trial for trial in ledger.trials if trial.role not in (*BASELINES, *REPEATS)]
    assert {trial.role for trial in searched} >= {Role.PREDICTED}
    assert [trial.plan for trial in searched if held.missing(trial.plan)] == []
    compared = [trial for trial in ledger.trials if trial.role in BASELINES]
    assert any(held.missing(trial.plan) for trial in compared)
    assert held.holds(bench.standings.entries[bench.standings.winner().number].plan)


def test_a_faster_baseline_that_the_trainer_cannot_hold_does_not_win_and_says_why(bench: Bench) -> None:
    def fast_pipelines(plan: Plan) -> float:
        return 0.1 if plan.layout.pipeline > 1 else 1.0

    bench.search(bench.study(), SimulatedLauncher(PREDICTOR, factor_of=fast_pipelines), axes=axes_for(SWIFT), trials=5)
    held, standings = holding(SWIFT), bench.standings
    winner = standings.winner()
    assert held.holds(standings.entries[winner.number].plan)
    fastest = standings.compare(winner.number, 240, lambda plan: "; ".join(held.missing(plan)) or None)[0]
    assert fastest.gain < 0.5
    assert (fastest.may_win, "a pipeline of 2 stages" in str(fastest.left_out)) == (False, True)
    rival = Rival(
        plan_id=str(fastest.plan_id),
        role=fastest.role,
        speed_ratio=4.0,
        speed_ratio_error=0.1,
        is_disturbed=False,
        left_out=f"ms-swift cannot hold {fastest.left_out}",
    )
    assert "measured faster, 4.00 +- 0.10 times as fast as the best plan, but ms-swift cannot hold a" in str(rival)
    assert "quiet repeats" not in str(rival)


def test_no_baseline_takes_the_place_of_plans_that_all_failed(bench: Bench) -> None:
    too_large = OutOfMemory(stage=0, rank=0, needed_bytes=120, limit_bytes=100)
    pool = SimulatedLauncher(PREDICTOR, cause_of=lambda plan: None if plan.layout.pipeline > 1 else too_large)
    with pytest.raises(NoFeasiblePlan, match="no plan of the search space completed"):
        bench.search(bench.study(), pool, axes=axes_for(SWIFT), trials=6)


def test_a_queued_plan_that_the_trainer_cannot_hold_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "queued.json").write_text(wire.encode(PIPELINE))
    prepared = prepared_of(tmp_path, queue=[str(tmp_path / "queued.json")])
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store, Agent(store) as agent:
        bench = Workbench(prepared=prepared, store=store, agent=agent, site=LocalSite("cpu"), folder=tmp_path)
        with pytest.raises(
            JobError,
            match=rf"^search\.queue\[0\]: ms-swift cannot hold plan {PIPELINE.id}: a pipeline of 2 stages; change it",
        ):
            Tuner(bench, unheard, SWIFT)
        assert Tuner(bench, unheard) is not None


def test_packs_whose_ends_no_order_tells_are_missing_for_ms_swift_alone() -> None:
    plan = replace(
        PIPELINE,
        packing=Packed(qv=6, qt=2000, qv_min=6, qt_min=2000, packer="best-fit"),
        layout=Layout(pipeline=1, data=2, zero=0),
        stages=(Stage(vision=5, language=4),),
    )
    assert holding(SWIFT).missing(plan) == ("packs whose ends the order of the samples does not tell",)
    assert holding(target_of("qwen-vl")).holds(plan)
