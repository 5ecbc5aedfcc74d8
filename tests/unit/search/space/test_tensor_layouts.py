"""Tensor degrees in a search: the names of layouts, those that are offered, and what is said about it."""

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from autotune.dimensions.folds import layout_name, named_layout
from autotune.dimensions.tensor import TensorDimension
from autotune.errors import JobError, NoFeasiblePlan
from autotune.prediction.predictor import Predictor
from autotune.search.solver.solver import Solver
from autotune.search.solver.splits import WantedSplits
from autotune.search.space.feasible import check_space, feasible_space
from autotune.search.space.space import Space
from tests.unit.prediction.test_shared_packs import sharing
from tests.values.exchanges import around_layers, exchanging
from tests.values.search import COSTS, limits_of, predictor_of, workload_of
from trials.costs.layer_costs import LayerCosts
from trials.job import SpaceSection
from trials.plan import Layout, Packed, Packing, Plan
from trials.workload import Workload

AMPLE = 1 << 50
PACKS = Packed(qv=9, qt=480, qv_min=9, qt_min=416)
DEALT = 45_000
"""Of the 50,000 parameters of a layer."""


def cut_costs(seconds: float, degrees: tuple[int, ...] = (2, 4)) -> LayerCosts:
    """Costs with exchanges of so many seconds for each pack and layer."""
    shared = sharing(seconds=0.0)
    language = replace(COSTS["language"], tensor_parallel_parameters=DEALT)
    layers = tuple((kind, language if kind == "language" else cost) for kind, cost in COSTS.layers)
    exchange = (0.0, 0.0, 0.0, seconds)
    around = (around_layers(each, exchange, exchange) for each in degrees)
    return exchanging(replace(shared, layers=layers), *around)


@cache
def predictor(seconds: float) -> Predictor:
    return predictor_of(cut_costs(seconds))


def searched(seconds: float, memory: int = AMPLE, devices: int = 4, **wanted: Any) -> tuple[Space, list[str]]:
    said: list[str] = []
    solver = Solver(predictor(seconds), limits_of(memory))
    asked = SpaceSection(**wanted)
    space = feasible_space(workload_of(memory, devices), solver, remedy="", wanted=asked, show=said.append)
    return space, [each for each in said if "ensor" in each]


def names_of(space: Space) -> set[str]:
    return {layout_name(plan.layout) for plan in space.starts}


# --- names ---


def test_a_layout_has_its_tensor_degree_in_its_name_and_one_without_the_name_that_it_had() -> None:
    assert layout_name(Layout(pipeline=2, data=4, zero=1)) == "p2-d4-z1"
    cut = Layout(pipeline=2, data=1, tensor=4, zero=1)
    assert layout_name(cut) == "p2-d1-t4-z1"
    assert named_layout("p2-d1-t4-z1", workload_of(devices=8)) == cut
    assert named_layout("p2-d4-z1", workload_of(devices=8)) is None


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("p1-d2-t2-z0", "float32", "1 x 2 x 2 = 4 ranks are not the 2 devices"),
        ("p1-d1-t2-z2", "float32", "ZeRO 2 does not work with tensor degree 2; use ZeRO 0 or 1, or tensor 1"),
        ("p1-d2-t1-z0", "float32", "a degree of 1 is left out, so that the name is p1-d2-z0"),
        ("p1-d1-t2-z0", "bfloat16", "bfloat16 weights need ZeRO 1"),
        ("p1-d1-t0-z0", "float32", "needs degrees of at least 1"),
    ],
)
def test_a_named_layout_that_cannot_be_is_refused_with_the_arithmetic(name: str, dtype: str, message: str) -> None:
    with pytest.raises(JobError, match=rf"search\.space\.layouts: '{name}' cannot be searched: .*{message}"):
        check_space(workload_of(dtype=dtype), SpaceSection(layouts=(name,)))


def test_a_pipeline_with_more_stages_than_layers_is_refused() -> None:
    with pytest.raises(JobError, match="10 stages need a layer each but the model has 9"):
        named_layout("p10-d1-t2-z0", workload_of(devices=20))


def test_a_named_degree_that_the_profile_has_not_timed_is_refused_with_the_remedy() -> None:
    with pytest.raises(JobError, match=r"no times of what 3 ranks exchange .*autotune profile JOB --fresh"):
        searched(0.0, devices=3, layouts=("p1-d1-t3-z0",))


# --- what is possible ---


def possible(workload: Workload) -> set[str]:
    return {
        layout_name(each)
        for each in TensorDimension().further(workload, Solver(predictor(0.0), limits_of(AMPLE))).possible
    }


def test_groups_of_tensor_ranks_lie_on_one_node() -> None:
    workload = workload_of(devices=4)
    everywhere = {"p1-d2-t2-z0", "p1-d2-t2-z1", "p2-d1-t2-z0"}
    assert possible(workload) == {*everywhere, "p1-d1-t4-z0"}
    assert possible(replace(workload, hardware=replace(workload.hardware, nodes=2))) == everywhere
    assert not possible(replace(workload, hardware=replace(workload.hardware, nodes=4)))


def test_bfloat16_weights_have_zero_1() -> None:
    assert {name[-2:] for name in possible(workload_of(devices=4, dtype="bfloat16"))} == {"z1"}


# --- what is offered ---


def test_where_no_exchanges_were_timed_nothing_is_said() -> None:
    solver = Solver(predictor_of(), limits_of(AMPLE))
    said: list[str] = []
    feasible_space(workload_of(AMPLE, 4), solver, remedy="", show=said.append)
    assert not said


def test_slow_exchanges_leave_the_space_as_it_was() -> None:
    space, said = searched(0.05)
    assert names_of(space) == names_of(
        searched(0.05, layouts=("p1-d4-z0", "p1-d4-z1", "p2-d2-z0", "p2-d2-z1", "p4-d1-z0"))[0]
    )
    assert not any("-t" in name for name in space.distributions["layout"].choices)  # type: ignore[attr-defined]
    assert len(said) == 1
    assert said[0].startswith("Tensor degree 1 is best and the only one that is searched: an epoch with p")
    assert said[0].endswith("times as long")


def test_cheap_exchanges_are_searched_and_their_plans_are_points() -> None:
    space, said = searched(0.0)
    offered = {name for name in names_of(space) if "-t" in name}
    assert 1 <= len(offered) <= 4
    assert len(said) == 1
    assert said[0].startswith("Tensor degrees are searched with p")
    for plan in space.starts:
        point = space.point(plan)
        assert point is not None
        assert (space.plan(point), point["layout"]) == (plan, layout_name(plan.layout))


def test_a_split_takes_account_of_what_tensor_ranks_exchange() -> None:
    def layers_behind(seconds: float) -> int:
        """Layers of the last stage, which are all of the language model."""
        plan = Solver(predictor(seconds), limits_of(AMPLE)).solve(PACKS, Layout(pipeline=2, data=1, tensor=2, zero=0))
        assert plan is not None
        return plan.stages[1].vision + plan.stages[1].language

    assert layers_behind(0.05) < layers_behind(0.0)


def test_named_layouts_are_searched_whatever_they_cost() -> None:
    space, said = searched(0.05, layouts=("p1-d2-t2-z0",))
    assert names_of(space) == {"p1-d2-t2-z0"}
    assert not said


def test_where_nothing_fits_without_a_tensor_degree_only_such_layouts_are_searched() -> None:
    of_costs, usual = predictor(0.0), workload_of(devices=4)

    def least(*names: str) -> float:
        solver = Solver(of_costs, limits_of(AMPLE))
        spaces = [searched(0.0, layouts=(name,))[0] for name in names]
        leanest = (solver.least_bytes(plan.packing, plan.layout) / 0.97 for space in spaces for plan in space.starts)
        return min(leanest)

    without = least("p1-d4-z0", "p1-d4-z1", "p2-d2-z0", "p2-d2-z1", "p4-d1-z0")
    cut = least(*possible(usual))
    assert cut < without
    space, said = searched(0.0, memory=round((cut + without) / 2))
    assert all("-t" in name for name in names_of(space))
    assert "no plan with tensor degree 1 fits the memory" in said[0]


def test_where_nothing_fits_at_all_the_leanest_plan_is_named() -> None:
    with pytest.raises(NoFeasiblePlan, match=r"no plan .* fits 1 MiB .* the leanest, p"):
        searched(0.0, memory=1 << 20)


def test_what_was_solved_to_compare_layouts_is_not_solved_again_for_the_space() -> None:
    counts: Counter[tuple[Packing, Layout]] = Counter()

    class Counting(Solver):
        def solutions(self, packing: Packing, layout: Layout, wanted: WantedSplits | None = None) -> tuple[Plan, ...]:
            counts[packing, layout] += 1
            return super().solutions(packing, layout, wanted)

    space = feasible_space(workload_of(AMPLE, 4), Counting(predictor(0.0), limits_of(AMPLE)), remedy="")
    assert any(plan.layout.tensor > 1 for plan in space.starts)
    assert {(plan.packing, plan.layout) for plan in space.starts} <= set(counts)
    assert set(counts.values()) == {1}
