"""Points and plans where stages use memory that is left: weights gathered once, and deferred weight gradients."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from autotune.dimensions.folds import layout_name
from autotune.prediction.predictor import Predictor
from autotune.search.solver.solver import Solver
from autotune.search.space.shifts import uses
from autotune.search.space.space import Space
from tests.unit.search.space.test_sharded_layouts import AMPLE, TIGHT, searched
from tests.unit.search.space.test_sharded_layouts import predictor as gathering
from tests.values.search import COSTS, deferring, limits_of, predictor_of
from trials.plan import Layout, Packed, Plan

SHARDS, BUBBLE = Layout(pipeline=1, data=4, zero=3), Layout(pipeline=4, data=1, zero=0, zero_bubble=True)
PACKS = Packed(qv=6, qt=320, qv_min=6, qt_min=256, packer="best-fit")


@cache
def machine_of(layout: Layout) -> tuple[Predictor, int]:
    """Return costs and a memory that plans of this layout use in part for weights or their gradients."""
    if layout.shards_weights:
        return gathering(0.001), TIGHT
    predictor = predictor_of(deferring(COSTS))
    ample = Solver(predictor, limits_of(AMPLE))
    usual = ample.solve(PACKS, replace(layout, zero_bubble=False))
    assert usual is not None
    return predictor, round(1.05 * ample.fullest(usual)[0])


def space_of(layout: Layout) -> Space:
    predictor, memory = machine_of(layout)
    # Of all capacities, plans of zero-bubble schedules would take ten times as long to solve.
    few: dict[str, Any] = {} if layout.shards_weights else {"qv": (6, 9), "qt": (320, 480)}
    space, _ = searched(predictor, memory, layouts=(layout_name(layout),), packers=("best-fit",), **few)
    return space


def stands_for_itself(space: Space, plan: Plan) -> bool:
    point = space.point(plan)
    return point is not None and space.plan(point) == plan


@pytest.mark.parametrize("layout", [SHARDS, BUBBLE], ids=["ZeRO 3", "zero bubble"])
@pytest.mark.parametrize("factor", [1.0, 1.06, 0.9])
def test_a_point_says_how_much_spare_memory_its_plan_uses_also_where_bytes_were_predicted_wrongly(
    layout: Layout, factor: float
) -> None:
    space, (predictor, memory) = space_of(layout), machine_of(layout)
    usual = {uses(start) for start in space.starts}
    space.renew(Solver(predictor.with_costs(predictor.costs, (factor, factor)), limits_of(memory)))
    assert space.starts
    assert all(stands_for_itself(space, start) for start in space.starts)
    assert ({uses(start) for start in space.starts} == usual) == (factor == 1.0)
    around = dict.fromkeys(plan for start in space.starts for plan in space.neighbours(start))
    held = [plan for plan in around if space.holds(plan)]
    assert all(stands_for_itself(space, plan) for plan in held)
    assert len({uses(plan) for plan in held}) > 1


@pytest.mark.parametrize("layout", [SHARDS, BUBBLE], ids=["ZeRO 3", "zero bubble"])
def test_a_plan_that_was_solved_for_less_memory_is_one_of_the_space(layout: Layout) -> None:
    space, (predictor, memory) = space_of(layout), machine_of(layout)
    lean = Solver(predictor, limits_of(round(0.96 * memory)))
    found = [(start, lean.solve(start.packing, layout)) for start in space.starts]
    assert any(plan is not None and uses(plan) != uses(start) for start, plan in found)
    assert all(plan is None or stands_for_itself(space, plan) for _, plan in found)


def test_where_whole_towers_are_recomputed_spare_memory_stays_unused() -> None:
    fit = space_of(SHARDS)
    towers = Space(replace(fit.axes, recompute="towers"), fit.solver)
    assert "gathered_once" not in towers.distributions
    for start in fit.starts:
        found = towers.pointed(start)
        assert uses(found) == (0,)
        assert stands_for_itself(towers, found) == towers.holds(found)
