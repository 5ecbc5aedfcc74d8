from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from autotune.dimensions.folds import layout_name
from autotune.search.space.space import Space
from tests.values.parameters import examples, parameters
from tests.values.search import COSTS, LANGUAGE_LAYERS, VISION_LAYERS, axes_of, predictor_of, solver_of
from tests.values.solver import selecting
from trials.costs.coefficients import KINDS
from trials.model.cut import check_layers
from trials.plan import Layout, Packed, Padded, Plan
from trials.stage import Stage

PREDICTOR = predictor_of()
TWO, FOUR = Layout(pipeline=2, data=2, zero=0), Layout(pipeline=4, data=1, zero=0)
LEAST = solver_of(1, PREDICTOR).least_bytes(Padded(samples=2), TWO)
TIGHT_SOLVER, AMPLE_SOLVER = (solver_of(limit, PREDICTOR) for limit in (round(1.4 * LEAST), 1 << 50))
SELECTIVE_SOLVER = solver_of(round(1.1 * LEAST), predictor_of(selecting(COSTS, [(0.2, 0.5, 0.5)] * len(KINDS))))
ENDS = (3, 9)
SPACES = {
    "tight": Space(axes_of(4), TIGHT_SOLVER),
    "ample": Space(axes_of(4), AMPLE_SOLVER),
    "selective": Space(axes_of(4), SELECTIVE_SOLVER),
    "given split": Space(axes_of(layouts=(TWO,), boundaries=ENDS), TIGHT_SOLVER),
    "all recomputed": Space(axes_of(4, recompute="all"), TIGHT_SOLVER),
    "none recomputed": Space(axes_of(4, recompute="none"), AMPLE_SOLVER),
    "wide slacks": Space(axes_of(4, qv_slacks=(0, 100), qt_slacks=(64, 1000)), AMPLE_SOLVER),
}
TIGHT, AMPLE = SPACES["tight"], SPACES["ample"]
SOLVERS = dict.fromkeys(SPACES, TIGHT_SOLVER) | dict.fromkeys(("ample", "none recomputed", "wide slacks"), AMPLE_SOLVER)
SOLVERS["selective"] = SELECTIVE_SOLVER


def points(distributions: Mapping[str, BaseDistribution]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({name: values(distribution) for name, distribution in distributions.items()})


def values(distribution: BaseDistribution) -> st.SearchStrategy[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return st.sampled_from(distribution.choices)
    assert isinstance(distribution, IntDistribution)
    return st.integers(distribution.low, distribution.high)


spaces = st.sampled_from(sorted(SPACES))
drawn = spaces.flatmap(
    lambda name: st.tuples(st.just(name), points(SPACES[name].near) | points(SPACES[name].distributions))
)
"""The name of a space, and a point of it."""


def ends_of(plan: Plan) -> tuple[int, ...]:
    return tuple(accumulate(stage.vision + stage.language for stage in plan.stages))


def start(space: Space, layout: Layout) -> Plan:
    return next(plan for plan in space.starts if plan.layout == layout)


def point_of(space: Space, layout: Layout) -> dict[str, Any]:
    point = space.point(start(space, layout))
    assert point is not None
    return point


# --- every point is a plan ---


@given(drawn)
@settings(max_examples=examples(60))
def test_every_point_stands_for_a_plan_that_can_be_trained(drawn: tuple[str, dict[str, Any]]) -> None:
    name, point = drawn
    plan = SPACES[name].plan(point)
    check_layers(plan, vision_layers=VISION_LAYERS, language_layers=LANGUAGE_LAYERS, dtype="float32")
    assert SOLVERS[name].admits(plan)


@given(drawn)
@settings(max_examples=examples(60))
def test_the_plan_of_a_point_has_a_point_that_stands_for_it(drawn: tuple[str, dict[str, Any]]) -> None:
    name, point = drawn
    space = SPACES[name]
    plan = space.plan(point)
    found = space.point(plan)
    assert found is not None
    assert found.keys() == space.distributions.keys()
    assert all(space.distributions[each].to_internal_repr(value) is not None for each, value in found.items())
    assert space.plan(found) == plan


@pytest.mark.parametrize("name", parameters({name: name for name in SPACES}, short=("selective",)))
def test_starts_and_their_neighbours_can_be_trained_and_have_points(name: str) -> None:
    space = SPACES[name]
    assert space.starts
    for plan in space.starts:
        near = list(space.neighbours(plan))
        assert len({plan, *near}) == len(near) + 1
        for each in (plan, *near):
            assert SOLVERS[name].admits(each)
            point = space.point(each)
            assert point is not None
            assert space.plan(point) == each


def test_starts_recompute_selectively_where_that_frees_enough() -> None:
    counts = [stage.recomputed[0] for plan in SPACES["selective"].starts for stage in plan.stages]
    assert any(each.selective_vision or each.selective_language for each in counts)


def test_a_start_is_the_solvers_own_plan() -> None:
    for plan in TIGHT.starts:
        assert isinstance(plan.packing, Packed)
        assert (plan.packing.packer, plan.packing.qv - plan.packing.qv_min) == ("best-fit", 0)
        assert plan == TIGHT_SOLVER.solve(plan.packing, plan.layout)


@pytest.mark.parametrize("name", parameters({name: name for name in SPACES}, short=("tight", "selective")))
def test_no_start_is_faster_than_its_bound_and_the_fastest_one_is_found_without_the_slow_ones(name: str) -> None:
    space, solver = SPACES[name], SOLVERS[name]
    seconds = dict(zip(space.starts, solver.epoch_seconds(space.starts), strict=True))
    bounds = {plan: solver.least_seconds(plan.packing, plan.layout) for plan in seconds}
    assert all(bounds[plan] <= seconds[plan] for plan in seconds)
    assert space.fastest_seconds() == min(seconds.values())
    assert not space.is_empty


PLAN = start(AMPLE, TWO)
PACKED = PLAN.packing
assert isinstance(PACKED, Packed)


@pytest.mark.parametrize(
    "plan",
    [
        replace(PLAN, packing=Padded(samples=4)),
        replace(PLAN, packing=replace(PACKED, packer="cutting-stock")),
        replace(PLAN, packing=replace(PACKED, qv_min=PACKED.qv - 3)),
        replace(PLAN, packing=replace(PACKED, qt=PACKED.qt + 1, qt_min=PACKED.qt_min + 1)),
        replace(PLAN, layout=Layout(pipeline=2, data=1, zero=0)),
    ],
    ids=["padded", "packer", "slack", "capacity", "layout"],
)
def test_a_plan_outside_the_space_has_no_point(plan: Plan) -> None:
    assert AMPLE.point(plan) is None
    assert not AMPLE.holds(plan)


@given(drawn, spaces)
@settings(max_examples=examples(60))
def test_a_space_holds_the_plans_that_its_own_points_stand_for(drawn: tuple[str, dict[str, Any]], other: str) -> None:
    name, point = drawn
    plan, space = SPACES[name].plan(point), SPACES[other]
    assert SPACES[name].holds(plan)
    found = space.point(plan)
    assert (found is not None) == space.holds(plan)
    assert found is None or space.plan(found) == plan


def test_a_plan_that_does_not_fit_or_does_not_recompute_as_the_job_says_is_not_held() -> None:
    everything_kept = replace(
        start(TIGHT, TWO),
        stages=tuple(Stage(vision=each.vision, language=each.language) for each in start(TIGHT, TWO).stages),
    )
    assert not TIGHT_SOLVER.admits(everything_kept)
    assert not TIGHT.holds(everything_kept)
    assert AMPLE.holds(everything_kept)
    assert not SPACES["all recomputed"].holds(everything_kept)


def test_a_plan_with_another_split_than_the_given_one_has_no_point() -> None:
    space = SPACES["given split"]
    other = Space(axes_of(layouts=(TWO,), boundaries=(4, 9)), TIGHT_SOLVER).starts[0]
    assert space.point(other) is None


# --- the axes ---


def test_parameters_keep_their_names() -> None:
    names = ["layout", "packer", "qv", "qt", "qv_slack", "qt_slack", "boundary_0", "boundary_1", "boundary_2"]
    for stage in range(4):
        names += [f"recompute_vision_{stage}", f"recompute_language_{stage}"]
    assert list(TIGHT.distributions) == list(TIGHT.near) == names


def test_choices_are_the_candidates_and_shifts_reach_as_far_as_the_axes_say() -> None:
    found, near = TIGHT.distributions, TIGHT.near
    assert found["layout"] == CategoricalDistribution(("p1-d4-z0", "p1-d4-z1", "p2-d2-z0", "p2-d2-z1", "p4-d1-z0"))
    assert found["qv"] == CategoricalDistribution((6, 9, 12))
    assert found["qt"] == CategoricalDistribution((320, 480))
    assert found["boundary_0"] == found["recompute_vision_0"] == IntDistribution(-9, 9)
    assert near["boundary_0"] == near["recompute_language_3"] == IntDistribution(-2, 2)


@given(points(SPACES["given split"].near))
@settings(max_examples=examples(20))
def test_a_given_split_is_kept(point: Mapping[str, Any]) -> None:
    assert not any(name.startswith("boundary") for name in point)
    assert ends_of(SPACES["given split"].plan(point)) == ENDS


@pytest.mark.parametrize(("name", "share"), [("all recomputed", 1), ("none recomputed", 0)])
def test_a_given_recomputation_is_kept(name: str, share: int) -> None:
    space = SPACES[name]
    assert not any(each.startswith("recompute") for each in space.distributions)
    for plan in (*space.starts, *space.neighbours(space.starts[0])):
        for stage in plan.stages:
            assert (stage.recompute_vision, stage.recompute_language) == (share * stage.vision, share * stage.language)


def test_a_single_layout_packer_and_pair_are_kept() -> None:
    space = Space(axes_of(layouts=(FOUR,), packers=("isf",), capacities=((9, 480),)), AMPLE_SOLVER)
    for plan in (*space.starts, *space.neighbours(space.starts[0])):
        assert isinstance(plan.packing, Packed)
        assert (plan.layout, plan.packing.packer, plan.packing.qv, plan.packing.qt) == (FOUR, "isf", 9, 480)


# --- shifts ---


@pytest.mark.parametrize(
    ("shifts", "moved"),
    [
        ({"boundary_0": 1}, (1, 0, 0)),
        ({"boundary_1": -1, "boundary_2": 1}, (0, -1, 1)),
        ({"boundary_2": -1}, (0, 0, -1)),
    ],
)
def test_a_boundary_moves_by_its_shift(shifts: dict[str, int], moved: tuple[int, ...]) -> None:
    point = point_of(AMPLE, FOUR)
    before, after = ends_of(AMPLE.plan(point)), ends_of(AMPLE.plan({**point, **shifts}))
    assert [new - old for old, new in zip(before, after, strict=True)] == [*moved, 0]


@pytest.mark.parametrize("shifts", [(-9, -9, -9), (9, 9, 9), (9, -9, 0)])
def test_shifts_leave_each_stage_a_layer(shifts: tuple[int, ...]) -> None:
    moved = {f"boundary_{number}": shift for number, shift in enumerate(shifts)}
    plan = AMPLE.plan({**point_of(AMPLE, FOUR), **moved})
    assert min(stage.vision + stage.language for stage in plan.stages) == 1


def test_recompute_grows_by_its_shift_as_far_as_the_stage_has_layers() -> None:
    point = point_of(AMPLE, FOUR)
    first = AMPLE.plan(point).stages[0]
    assert first.vision > 0
    more = AMPLE.plan({**point, "recompute_vision_0": 1, "recompute_language_3": 9})
    assert more.stages[0] == replace(first, recompute_vision=1)
    assert more.stages[3].recompute_language == more.stages[3].language > 0
    assert AMPLE.plan({**point, "recompute_vision_0": -1}) == AMPLE.plan(point)


def test_a_layout_without_a_stage_ignores_its_parameters() -> None:
    point = point_of(AMPLE, TWO)
    assert AMPLE.plan({**point, "boundary_1": 2, "recompute_language_3": 2}) == AMPLE.plan(point)


def test_a_shifted_split_recomputes_what_its_own_memory_requires() -> None:
    shifted = TIGHT.plan({**point_of(TIGHT, TWO), "boundary_0": -1})
    assert shifted == TIGHT_SOLVER.fit(shifted.packing, shifted.layout, ends_of(shifted))


def test_shifts_that_would_not_fit_are_taken_back_together() -> None:
    point = point_of(TIGHT, TWO)
    recomputed = [stage.recompute_vision + stage.recompute_language for stage in TIGHT.plan(point).stages]
    assert sum(recomputed) > 0
    greedy = {name: -9 for name in TIGHT.distributions if name.startswith("recompute")}
    plan = TIGHT.plan({**point, **greedy})
    assert TIGHT_SOLVER.admits(plan)
    kept: tuple[Stage, ...] = tuple(replace(s, recompute_vision=0, recompute_language=0) for s in plan.stages)
    assert not TIGHT_SOLVER.admits(replace(plan, stages=kept))


def test_a_given_count_of_recomputed_layers_is_kept() -> None:
    counts = ((2, 0), (1, 3))
    space = Space(axes_of(layouts=(TWO,), boundaries=ENDS, recompute=counts), AMPLE_SOLVER)
    assert not any(each.startswith(("boundary", "recompute")) for each in space.distributions)
    for plan in (*space.starts, *space.neighbours(space.starts[0])):
        assert tuple((stage.recompute_vision, stage.recompute_language) for stage in plan.stages) == counts
        point = space.point(plan)
        assert point is not None
        assert space.plan(point) == plan


def test_a_point_means_the_same_plan_after_the_solver_has_changed() -> None:
    """If both can be trained, since importances and other samplers read the points of the whole study."""
    space = Space(axes_of(), TIGHT_SOLVER)
    before = {plan: space.point(plan) for plan in (*space.starts, *space.neighbours(space.starts[0]))}
    space.renew(AMPLE_SOLVER)
    assert space.starts != tuple(before)
    assert {plan: space.point(plan) for plan in before} == before
    for plan in space.starts:
        point = space.point(plan)
        assert point is not None
        assert space.plan(point) == plan


# --- the nearest packing ---


def test_a_pair_that_is_no_candidate_stands_for_the_nearest_one() -> None:
    point = point_of(AMPLE, TWO)
    packing = AMPLE.plan({**point, "qv": 12, "qt": 320}).packing
    assert isinstance(packing, Packed)
    pairs = [plan.packing for plan in AMPLE.starts if plan.layout == TWO]
    assert packing in pairs
    assert (packing.qv, packing.qt) == (12, 480)


def test_a_pair_that_misses_the_batch_stands_for_one_that_keeps_it() -> None:
    missed = (40, 2400)
    space = Space(axes_of(layouts=(TWO,), capacities=((9, 480), missed)), AMPLE_SOLVER)
    assert not AMPLE_SOLVER.keeps_batch(Packed(qv=40, qt=2400, qv_min=40, qt_min=2336), TWO)
    plan = space.plan({**point_of(space, TWO), "qv": 40, "qt": 2400})
    assert isinstance(plan.packing, Packed)
    assert (plan.packing.qv, plan.packing.qt, layout_name(plan.layout)) == (9, 480, "p2-d2-z0")


def test_slacks_above_a_capacity_are_all_of_it() -> None:
    space = SPACES["wide slacks"]
    plan = space.plan({**point_of(space, TWO), "packer": "isf", "qv_slack": 100, "qt_slack": 1000})
    assert isinstance(plan.packing, Packed)
    assert (plan.packing.qv_min, plan.packing.qt_min) == (0, 0)
