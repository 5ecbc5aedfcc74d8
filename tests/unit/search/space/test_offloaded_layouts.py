"""Layers that offload in a search: the names of layouts, those that are offered, and what is said about it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.dimensions.folds import check_named, layout_name, named_layout
from autotune.errors import JobError
from autotune.plan_text import plan_text
from autotune.search.learning.coordinates import plan_coordinates
from autotune.search.learning.warm_start import moved
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import check_space, feasible_space
from autotune.search.space.space import Space
from tests.machines import search_bench
from tests.machines.search_bench import Bench
from tests.machines.simulated import SimulatedLauncher
from tests.unit.prediction.test_offloaded_layers import offloaded, timed
from tests.values.exchanges import copies, exchanging
from tests.values.search import COSTS, axes_of, frozen_vision, predictor_of, prepared_of, runner_of, workload_of
from trials.costs.layer_costs import LayerCosts
from trials.job import SearchSection, SpaceSection
from trials.outcome import Rejected
from trials.plan import Layout, Offload

AMPLE = 1 << 50
TIGHT = 30 << 20
FAST = timed(out=0.0, back=0.0)


def searched(
    costs: LayerCosts, memory: int = TIGHT, host: float = AMPLE, devices: int = 2, **wanted: Any
) -> tuple[Space, list[str]]:
    said: list[str] = []
    work = workload_of(memory, devices)
    solver = Solver(predictor_of(costs), replace(Limits.of(work), host_limit_bytes=host))
    asked = SpaceSection(**wanted)
    space = feasible_space(work, solver, remedy="", wanted=asked, show=said.append)
    return space, [each for each in said if "offload" in each]


def offloads_of(space: Space) -> set[Offload]:
    return {plan.layout.offload for plan in space.starts}


# --- what is offered ---


def test_they_are_searched_where_plans_recompute_and_copies_take_less_time() -> None:
    space, (reason,) = searched(FAST)
    assert offloads_of(space) > {"none"}
    assert reason.startswith("Layouts whose layers offload what they keep are searched with p")
    for plan in space.starts:
        point = space.point(plan)
        assert point is not None
        assert (space.plan(point), point["layout"]) == (plan, layout_name(plan.layout))


def test_they_are_left_out_where_copies_take_longer() -> None:
    space, (reason,) = searched(timed(out=1.0, back=1.0))
    assert offloads_of(space) == {"none"}
    assert reason.startswith("Recomputation is best, and no layers that offload are searched: layers could")


def test_only_the_kind_offloads_whose_copies_take_less_time() -> None:
    # For each byte that they keep, passes of vision layers take 2 and 4 ns, of language layers about 1 and 2 ns.
    space, (reason,) = searched(timed(out=2.5e-9, back=4e-9))
    assert offloads_of(space) == {"none", "vision"}, reason


def test_they_are_left_out_where_nothing_is_recomputed() -> None:
    space, (reason,) = searched(FAST, AMPLE)
    assert offloads_of(space) == {"none"}
    assert reason == (
        "Recomputation is best, and no layers that offload are searched: layers could offload what they keep, but "
        "copies take longer than recomputation, plans fit the memory without, or the host lacks memory"
    )


@pytest.mark.parametrize(
    "costs",
    [
        pytest.param(COSTS, id="older", marks=pytest.mark.long),
        pytest.param(replace(FAST, compile_seconds=30.0), id="compiled"),
    ],
)
def test_nothing_is_said_where_they_are_not_possible(costs: LayerCosts) -> None:
    space, said = searched(costs)
    assert offloads_of(space) == {"none"}
    assert not said


def test_they_are_left_out_where_the_host_has_too_little_memory() -> None:
    space, (reason,) = searched(FAST, host=1000.0)
    assert offloads_of(space) == {"none"}
    assert reason.endswith("or the host lacks memory")


def test_a_layout_is_left_out_whose_plans_offload_nothing_of_a_kind() -> None:
    frozen = exchanging(frozen_vision(), copies(0.0, 0.0))
    space, _ = searched(frozen, 20 << 20, qv=(5, 8), qt=(320, 480))
    assert offloads_of(space) == {"none", "language"}
    offloading_plans = [plan for plan in space.starts if plan.layout.offload != "none"]
    for plan in (*offloading_plans, *space.neighbours(offloading_plans[0])):
        assert any(stage.recompute_language for stage in plan.stages), plan_text(plan)


# --- names ---


@pytest.mark.parametrize(
    ("name", "offload"),
    [
        pytest.param("p2-d1-z0-ov", "vision", marks=pytest.mark.long),
        pytest.param("p2-d1-z0-ol", "language", marks=pytest.mark.long),
        ("p2-d1-z0-ovl", "both"),
    ],
)
def test_a_layout_may_be_named(name: str, offload: Offload) -> None:
    layout = Layout(pipeline=2, data=1, zero=0, offload=offload)
    assert layout_name(layout) == name
    assert named_layout(name, workload_of()) == layout
    assert {layout_name(plan.layout) for plan in searched(FAST, layouts=(name,))[0].starts} == {name}


def test_zero_3_is_refused_with_the_remedy() -> None:
    with pytest.raises(JobError, match=r"'p1-d2-z3-ov' cannot be searched: ZeRO 3 .*use ZeRO 2, or offload none"):
        check_space(workload_of(), SpaceSection(layouts=("p1-d2-z3-ov",)))


def test_a_name_that_an_older_profile_does_not_know_is_refused_with_the_remedy() -> None:
    with pytest.raises(JobError, match=r"no times of copies of what layers keep .*autotune profile JOB --fresh"):
        searched(COSTS, layouts=("p2-d1-z0-ov",))


def test_a_cpu_is_refused_with_the_reason(tmp_path: Path) -> None:
    prepared = prepared_of(tmp_path, space={"layouts": ["p2-d1-z0-ov"]})
    cpu = replace(prepared.workload, hardware=replace(prepared.workload.hardware, accelerator="cpu"))
    with pytest.raises(JobError, match="where a CPU has it already; use offload none"):
        check_named(prepared.job, cpu)


def test_the_text_of_a_plan_says_what_offloads() -> None:
    texts = [plan_text(offloaded(offload, "5+0r2,0", "0+4r0,1")) for offload in ("none", "vision", "both")]
    assert "ZeRO 0; split 5v+0l | 0v+4l; recompute 2v+0l | 0v+1l; packs" in texts[0]
    assert "ZeRO 0, vision layers offload; split" in texts[1]
    assert "; offload v, recompute l 2v+0l | 0v+1l; packs" in texts[1]
    assert "ZeRO 0, layers offload; split 5v+0l | 0v+4l; offload 2v+0l | 0v+1l; packs" in texts[2]


# --- plans ---


def test_a_plan_of_another_search_is_taken_over_where_copies_were_timed() -> None:
    space, _ = searched(FAST, layouts=("p2-d1-z0-ovl",))
    other, _ = searched(COSTS)
    plan = space.starts[0]
    assert moved(plan, workload_of(TIGHT), space) == plan
    assert moved(plan, workload_of(TIGHT), other) is None


def test_plans_that_offload_other_layers_are_apart() -> None:
    predictor = predictor_of(FAST)
    none, vision, both = (
        plan_coordinates(predictor, offloaded(offload, "5+4r5,4")) for offload in ("none", "vision", "both")
    )
    assert abs(vision - none).sum() == pytest.approx(0.5)
    assert abs(both - none).sum() == pytest.approx(1.0)


def test_a_plan_that_offloads_more_than_the_host_has_is_not_run(tmp_path: Path) -> None:
    predictor, plan = predictor_of(FAST), offloaded("both", "5+0r5,0", "0+4r0,4")
    most = max(stage.host for stage in predictor.predict(plan).stage_memory)
    runner = runner_of(tmp_path, SimulatedLauncher(predictor), predictor=predictor)
    assert runner.rejection(plan) is None
    work = runner._prepared.workload
    ram = round(4 * work.hardware.of_node * most) - 8
    small = replace(work, hardware=replace(work.hardware, ram_bytes=ram))
    runner._prepared = replace(runner._prepared, workload=small)
    rejected = runner.rejection(plan)
    assert isinstance(rejected, Rejected)
    assert "is predicted to offload" in rejected.reason
    assert not Solver(predictor, Limits.of(small)).admits(plan)
    # Ranks of all groups share the memory of their host.
    enough = replace(work, hardware=replace(work.hardware, ram_bytes=ram + 16))
    assert Solver(predictor, Limits.of(enough)).admits(plan)
    assert not Solver(predictor, Limits.of(enough, groups=2)).admits(plan)
    runner._prepared = replace(runner._prepared, workload=enough)
    assert runner.rejection(plan) is None
    two = runner._prepared.job.model_copy(update={"search": SearchSection(parallel=2)})
    runner._prepared = replace(runner._prepared, job=two)
    assert isinstance(runner.rejection(plan), Rejected)


@pytest.mark.long
def test_a_search_wins_with_layers_that_offload(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = predictor_of(FAST)
    monkeypatch.setattr(search_bench, "PREDICTOR", predictor)
    monkeypatch.setattr(search_bench, "MEMORY", 20 << 20)
    usual = Layout(pipeline=2, data=1, zero=0)
    axes = axes_of(layouts=(usual, replace(usual, offload="both")))
    trials = bench.search(bench.study(), SimulatedLauncher(predictor), memory=20 << 20, axes=axes).trials
    winner = bench.standings.entries[bench.standings.winner().number].plan
    assert {trial.plan.layout for trial in trials} >= set(axes.layouts)
    assert winner.layout.offload == "both"
