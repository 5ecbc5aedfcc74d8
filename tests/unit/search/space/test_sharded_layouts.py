"""ZeRO 2 and 3 in a search: the names of layouts, those that are offered, and what is said about it."""

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autotune.dimensions.folds import layout_name, named_layout
from autotune.errors import JobError, NoFeasiblePlan
from autotune.prediction.predictor import Predictor
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import check_space, feasible_space
from autotune.search.space.space import Space
from tests.unit.prediction.test_sharded_weights import sharded
from tests.values.exchanges import averages, exchanging, without
from tests.values.parameters import examples
from tests.values.search import BATCH, COSTS, limits_of, predictor_of, workload_of
from trials.costs.layer_costs import LayerCosts
from trials.job import SpaceSection
from trials.plan import Layout, Plan

AMPLE = 1 << 50
TIGHT = 135 << 20
"""With four ranks and one stage, many packs need recomputed layers with ZeRO 1, and fewer with ZeRO 3."""
USUAL = {"p1-d4-z0", "p1-d4-z1", "p2-d2-z0", "p2-d2-z1", "p4-d1-z0"}
SHARDED = {"p1-d4-z2", "p1-d4-z3"}


def heavy(head: int = 1_000_000, layer: int = 1_000_000) -> LayerCosts:
    """Costs with this number of parameters in the head and in each vision and language layer."""
    counts = {"head": head, "vision": layer, "language": layer}
    layers = tuple((kind, replace(cost, parameters=counts.get(kind, cost.parameters))) for kind, cost in COSTS.layers)
    return without(replace(COSTS, layers=layers), "average")


@cache
def predictor(seconds: float, head: int = 1_000_000, layer: int = 1_000_000) -> Predictor:
    """Gathers take so long for each layer; reductions take no time."""
    return predictor_of(sharded(heavy(head, layer), seconds=(seconds,) * 5, scatter=0.0))


def searched(of_costs: Predictor, memory: int = AMPLE, devices: int = 4, **wanted: Any) -> tuple[Space, list[str]]:
    said: list[str] = []
    solver = Solver(of_costs, limits_of(memory))
    asked = SpaceSection(**wanted)
    space = feasible_space(workload_of(memory, devices), solver, remedy="", wanted=asked, show=said.append)
    return space, [each for each in said if "ZeRO" in each]


def names_of(space: Space) -> set[str]:
    return {layout_name(plan.layout) for plan in space.starts}


# --- names ---


def test_a_named_layout_may_have_zero_2_or_3() -> None:
    assert named_layout("p1-d4-z3", workload_of(devices=4)) == Layout(pipeline=1, data=4, zero=3)
    assert named_layout("p1-d4-z1", workload_of(devices=4)) is None
    space, said = searched(predictor(1.0), layouts=("p1-d4-z3", "p1-d4-z2"))
    assert names_of(space) == SHARDED
    assert not said


@pytest.mark.parametrize(
    ("name", "devices", "message"),
    [
        ("p2-d2-z3", 4, "ZeRO 3 does not work with a pipeline; use ZeRO 0 or 1, or pipeline 1"),
        ("p1-d2-z3", 4, "1 x 2 = 2 ranks are not the 4 devices"),
        ("p1-d1-z2", 1, "ZeRO 2 shares gradients among data ranks, and there is only one; use ZeRO 1"),
        ("p1-d2-t2-z3", 4, "ZeRO 3 does not work with tensor degree 2; use ZeRO 0 or 1, or tensor 1"),
    ],
)
def test_a_named_layout_that_cannot_be_is_refused_with_the_reason(name: str, devices: int, message: str) -> None:
    with pytest.raises(JobError, match=rf"search\.space\.layouts: '{name}' cannot be searched: .*{message}"):
        check_space(workload_of(devices=devices), SpaceSection(layouts=(name,)))


def test_a_named_layout_that_an_older_profile_does_not_know_is_refused_with_the_remedy() -> None:
    with pytest.raises(JobError, match=r"'p1-d4-z3' .*no times of what ranks exchange .*autotune profile JOB --fresh"):
        searched(predictor_of(), layouts=("p1-d4-z3",))


# --- what is offered ---


def test_an_older_profile_leaves_the_space_as_it_was_without_a_word() -> None:
    space, said = searched(predictor_of(heavy()), TIGHT)
    assert not SHARDED & names_of(space)
    assert not said


def test_where_memory_does_not_lack_they_cannot_help() -> None:
    space, said = searched(predictor(0.0))
    assert names_of(space) == USUAL
    (reason,) = said
    assert reason.startswith("ZeRO 0 and 1 are best and the only stages that are searched: 2 and 3 save memory, but")


def test_where_they_save_recomputation_they_are_searched_and_their_plans_are_points() -> None:
    space, said = searched(predictor(0.0), TIGHT)
    (reason,) = said
    assert reason.startswith("ZeRO 2 and 3 are searched with p1-d4-z")
    assert SHARDED & names_of(space)
    for plan in space.starts:
        point = space.point(plan)
        assert point is not None
        assert (space.plan(point), point["layout"]) == (plan, layout_name(plan.layout))
    of_three, of_one = (
        {plan.packing: plan for plan in space.starts if layout_name(plan.layout) == name}
        for name in ("p1-d4-z3", "p1-d4-z1")
    )

    def recomputed(plan: Plan) -> int:
        return plan.stages[0].recompute_vision + plan.stages[0].recompute_language

    both = of_three.keys() & of_one.keys()
    assert both
    assert all(recomputed(of_three[packing]) <= recomputed(of_one[packing]) for packing in both)
    assert any(recomputed(of_three[packing]) < recomputed(of_one[packing]) for packing in both)


def test_slow_exchanges_leave_the_space_as_it_was() -> None:
    slow = predictor_of(exchanging(sharded(heavy(), seconds=(0.1,) * 5, scatter=1e-7), averages(1e-7)))
    space, said = searched(slow, TIGHT)
    assert names_of(space) == names_of(searched(slow, TIGHT, layouts=tuple(sorted(USUAL)))[0])
    (reason,) = said
    assert reason.startswith("ZeRO 0 and 1 are best and the only stages that are searched: an epoch with p1-d4-z")
    assert reason.endswith("times as long")


def test_where_nothing_fits_with_zero_0_or_1_only_such_layouts_are_searched() -> None:
    # More ranks than layers, and a prime number of them: no pipeline divides them.
    devices, batch = 11, 4 * BATCH
    of_costs = predictor_of(sharded(heavy(), seconds=(0.0,) * 5, scatter=0.0), batch=batch)
    said: list[str] = []

    def space(memory: int, *names: str) -> Space:
        work = replace(workload_of(memory, devices), global_batch_samples=batch)
        asked = SpaceSection(layouts=names) if names else SpaceSection()
        return feasible_space(work, Solver(of_costs, limits_of(memory)), remedy="", wanted=asked, show=said.append)

    def least(*names: str) -> float:
        solver = Solver(of_costs, limits_of(AMPLE))
        plans = [plan for name in names for plan in space(AMPLE, name).starts]
        return min(solver.least_bytes(plan.packing, plan.layout) / 0.97 for plan in plans)

    without, shared = least("p1-d11-z0", "p1-d11-z1"), least("p1-d11-z2", "p1-d11-z3")
    assert shared < without
    said.clear()
    found = space(round((shared + without) / 2))
    assert {plan.layout.zero for plan in found.starts} <= {2, 3}
    assert "no plan with ZeRO 0 or 1 fits the memory" in next(each for each in said if "ZeRO" in each)


def test_where_nothing_fits_at_all_the_leanest_plan_is_named() -> None:
    with pytest.raises(NoFeasiblePlan, match=r"no plan .* fits 1 MiB .* the leanest, p"):
        searched(predictor(0.0), memory=1 << 20)


def test_a_split_over_several_stages_leaves_them_out() -> None:
    _, said = searched(predictor(0.0), TIGHT, split=(4, 5))
    assert not said


# --- refusals ---


@settings(max_examples=examples(15))
@given(limit=st.integers(1, 160 << 20))
def test_a_refusal_needs_more_than_is_available_and_its_remedy_works(limit: int) -> None:
    refused = ""
    try:
        searched(predictor(1.0), memory=limit, devices=2)
    except NoFeasiblePlan as error:
        refused = str(error)
    assume(refused)
    found = re.search(r"needs about (\d+) MiB on stage \d, (-?\d+) MiB more than available", refused)
    assert found, refused
    needed, missing = map(int, found.groups())
    assert needed << 20 > limit
    assert missing == needed - (limit >> 20) > 0
    searched(predictor(1.0), memory=(needed + 1) << 20, devices=2)
