from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from autotune.search.layouts import layout_name, layouts
from autotune.search.space import Space
from tests.search_values import LANGUAGE_LAYERS, VISION_LAYERS, predictor_of, solver_of, workload_of
from trials.plan import Layout, Packed, Padded, Plan

PAIRS = ((6, 320), (9, 480), (12, 480))
PREDICTOR = predictor_of()
LAYOUTS = layouts(workload_of().model, 4)
LIMIT = round(1.4 * solver_of(1, PREDICTOR).least_bytes(Padded(samples=2), Layout(pipeline=2, data=2, zero=0)))
TIGHT, AMPLE = (Space(LAYOUTS, PAIRS, solver_of(limit, PREDICTOR)) for limit in (LIMIT, 1 << 50))


def values(distribution: BaseDistribution) -> st.SearchStrategy[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return st.sampled_from(distribution.choices)
    assert isinstance(distribution, IntDistribution)
    return st.integers(distribution.low, distribution.high)


points = st.fixed_dictionaries({name: values(distribution) for name, distribution in TIGHT.distributions.items()})


@given(points, st.sampled_from([TIGHT, AMPLE]))
@settings(deadline=None, max_examples=100)
def test_every_point_is_a_plan_of_the_model_or_none(point: Mapping[str, Any], space: Space) -> None:
    plan = space.plan(point)
    if plan is None:
        assert space is TIGHT
        return
    plan.check(vision_layers=VISION_LAYERS, language_layers=LANGUAGE_LAYERS)
    assert layout_name(plan.layout) == point["layout"]
    assert isinstance(plan.packing, Packed)
    assert (plan.packing.qv, plan.packing.qt, plan.packing.packer) == (point["qv"], point["qt"], point["packer"])
    assert plan.packing.qv_min == max(0, point["qv"] - point["qv_slack"])
    assert plan.packing.qt_min == max(0, point["qt"] - point["qt_slack"])


def test_parameters_keep_their_names() -> None:
    assert list(TIGHT.distributions) == [
        "layout",
        "packer",
        "qv",
        "qt",
        "qv_slack",
        "qt_slack",
        "boundary_0",
        "boundary_1",
        "boundary_2",
        "recompute_0",
        "recompute_1",
        "recompute_2",
        "recompute_3",
    ]


def test_choices_are_the_candidates() -> None:
    found = TIGHT.distributions
    assert found["layout"] == CategoricalDistribution(("p1-d4-z0", "p1-d4-z1", "p2-d2-z0", "p2-d2-z1", "p4-d1-z0"))
    assert found["qv"] == CategoricalDistribution((6, 9, 12))
    assert found["qt"] == CategoricalDistribution((320, 480))


def test_the_grid_holds_every_candidate_with_the_solvers_own_split_and_recompute() -> None:
    grid = TIGHT.grid()
    assert len(grid) == len({tuple(point.values()) for point in grid}) == len(LAYOUTS) * 3 * len(PAIRS)
    solver = solver_of(LIMIT, PREDICTOR)
    for point in grid:
        assert set(point) == set(TIGHT.distributions)
        assert all(point[name] in values_of(distribution) for name, distribution in TIGHT.distributions.items())
        packing = Packed(
            qv=point["qv"], qt=point["qt"], qv_min=point["qv"], qt_min=point["qt"] - 64, packer=point["packer"]
        )
        layout = next(layout for layout in LAYOUTS if layout_name(layout) == point["layout"])
        assert TIGHT.plan(point) == solver.solve(packing, layout)


def values_of(distribution: BaseDistribution) -> tuple[Any, ...]:
    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    assert isinstance(distribution, IntDistribution)
    return tuple(range(distribution.low, distribution.high + 1))


def plan_at(space: Space, **changes: int) -> Plan:
    point = next(point for point in space.grid() if point["layout"] == "p4-d1-z0")
    plan = space.plan({**point, **changes})
    assert plan is not None
    return plan


def ends_of(plan: Plan) -> list[int]:
    counts = [stage.vision + stage.language for stage in plan.stages]
    return [sum(counts[: number + 1]) for number in range(len(counts))]


@pytest.mark.parametrize(
    ("shifts", "moved"),
    [
        ({"boundary_0": 1}, (1, 0, 0)),
        ({"boundary_1": -1, "boundary_2": 1}, (0, -1, 1)),
        ({"boundary_2": -1}, (0, 0, -1)),
    ],
)
def test_a_boundary_moves_by_its_shift(shifts: dict[str, int], moved: tuple[int, ...]) -> None:
    before, after = ends_of(plan_at(AMPLE)), ends_of(plan_at(AMPLE, **shifts))
    assert [new - old for old, new in zip(before, after, strict=True)] == [*moved, 0]


def test_shifts_leave_each_stage_a_layer() -> None:
    down, up = ({f"boundary_{number}": shift for number in range(3)} for shift in (-2, 2))
    far = plan_at(AMPLE, **down), plan_at(AMPLE, **up), plan_at(AMPLE, boundary_0=2, boundary_1=-2)
    for plan in far:
        assert min(stage.vision + stage.language for stage in plan.stages) == 1


def test_recompute_grows_and_shrinks_by_its_shift_vision_layers_first() -> None:
    none = plan_at(AMPLE, recompute_0=-1)
    one = plan_at(AMPLE, recompute_0=1)
    two = plan_at(AMPLE, recompute_0=2, recompute_3=1)
    counts = [[(s.recompute_vision, s.recompute_language) for s in plan.stages] for plan in (none, one, two)]
    assert none.stages[0].vision >= 1
    assert counts[0] == [(0, 0)] * 4
    assert counts[1] == [(1, 0), (0, 0), (0, 0), (0, 0)]
    assert counts[2] == [(min(2, none.stages[0].vision), 0), (0, 0), (0, 0), (0, 1)]


def test_language_layers_are_the_first_to_be_spared() -> None:
    point = next(point for point in TIGHT.grid() if point["layout"] == "p1-d4-z0")
    before, one, two = (TIGHT.plan({**point, "recompute_0": by}) for by in (0, -1, -2))
    assert before is not None
    assert one is not None
    assert two is not None
    counts = [(plan.stages[0].recompute_vision, plan.stages[0].recompute_language) for plan in (before, one, two)]
    vision, language = counts[0]
    assert language >= 1
    assert counts[1:] == [(vision, language - 1), (vision - max(0, 2 - language), max(0, language - 2))]


def test_a_layout_without_a_stage_ignores_its_parameters() -> None:
    point = next(point for point in AMPLE.grid() if point["layout"] == "p2-d2-z0")
    assert AMPLE.plan({**point, "boundary_1": 2, "recompute_3": 2}) == AMPLE.plan(point)


def test_a_shifted_split_recomputes_what_its_own_memory_asks() -> None:
    point = next(point for point in TIGHT.grid() if point["layout"] == "p2-d2-z0")
    shifted = TIGHT.plan({**point, "boundary_0": -1})
    assert shifted is not None
    assert shifted == solver_of(LIMIT, PREDICTOR).fit(shifted.packing, shifted.layout, tuple(ends_of(shifted)))
