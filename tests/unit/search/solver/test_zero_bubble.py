"""Plans whose stages defer weight gradients: predicted on real packs, within the memory, and offered where they pay."""

import math
from dataclasses import replace
from itertools import combinations

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from autotune.dimensions.zero_bubble import ZeroBubbleDimension
from autotune.prediction.predictor import Predictor
from autotune.search.explanation.changes import resplit
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from autotune.search.space.offers import LayoutOffer, offered_layouts
from tests.values.parameters import examples
from tests.values.search import COSTS, deferring, limits_of, predictor_of, workload_of
from tests.values.solver import problems
from tests.values.training import plan_of
from trials.costs.layer_costs import LayerCosts
from trials.plan import Layout, Packed, Packing

AMPLE = 1 << 40
PACKS = Packed(qv=6, qt=300, qv_min=6, qt_min=250, packer="best-fit")


@st.composite
def deferring_problems(draw: st.DrawFn) -> tuple[Predictor, Limits, Packing, Layout]:
    predictor, limits, packing, layout = draw(problems().filter(lambda found: found[3].pipeline > 1))
    costs = deferring(predictor.costs, draw(st.floats(0, 0.6)), draw(st.floats(0, 1.2)))
    return predictor.with_costs(costs), limits, packing, replace(layout, zero_bubble=True, offload="none")


# Shrinking would solve the problem for minutes.
@given(deferring_problems())
@settings(max_examples=examples(30), phases=(Phase.explicit, Phase.reuse, Phase.generate))
def test_a_solution_fits_and_hardly_any_split_is_faster(case: tuple[Predictor, Limits, Packing, Layout]) -> None:
    predictor, limits, packing, layout = case
    solver = Solver(predictor, limits)
    found = solver.solve(packing, layout)
    every = combinations(range(1, limits.layers), layout.pipeline - 1)
    plans = solver.fit_several(packing, layout, [(*inner, limits.layers) for inner in every])
    fitting = [plan for plan in plans if plan is not None]
    for plan in [*fitting, *([found] if found else [])]:
        assert plan.layout == layout
        assert solver.fullest(plan)[0] <= limits.usable_bytes
    if fitting:
        assert found is not None
        assert solver.epoch_seconds([found])[0] <= min(solver.epoch_seconds(fitting)) * 1.01


def test_stages_defer_the_most_packs_that_fit_the_memory_of_1f1b() -> None:
    predictor, layout = predictor_of(deferring(COSTS)), Layout(pipeline=4, data=1, zero=0)
    usual = Solver(predictor, limits_of(AMPLE)).solve(PACKS, layout)
    assert usual is not None
    needed, _ = Solver(predictor, limits_of(AMPLE)).fullest(usual)
    limits = replace(limits_of(math.ceil(needed)), usable_share=1.0)
    solver, whole = Solver(predictor, limits), replace(usual, layout=replace(layout, zero_bubble=True))
    assert solver.fullest(whole)[0] > needed
    found = solver.fit(PACKS, whole.layout, usual.boundaries)
    assert found is not None
    assert any(stage.most_deferred is not None for stage in found.stages)
    assert solver.fullest(found)[0] <= math.ceil(needed)
    assert solver.epoch_seconds([found]) < solver.epoch_seconds([usual])
    for number, (stage, most) in enumerate(zip(found.stages, found.most_deferred, strict=True)):
        if stage.most_deferred is not None:
            one_more = None if most + 1 == number else most + 1
            stages = [*found.stages[:number], replace(stage, most_deferred=one_more), *found.stages[number + 1 :]]
            assert solver.fullest(replace(found, stages=tuple(stages)))[0] > math.ceil(needed)


def offer(costs: LayerCosts) -> LayoutOffer:
    solver, workload = Solver(predictor_of(costs), limits_of(AMPLE)), workload_of(AMPLE, devices=4)
    further = ZeroBubbleDimension().further(workload, solver)
    assert further is not None
    usual = Layout(pipeline=4, data=1, zero=0)
    plan = solver.solve(PACKS, usual)
    assert plan is not None
    return offered_layouts(further, solver, [PACKS], solver.epoch_seconds([plan])[0])


def test_pipelines_with_few_micro_batches_are_offered_it_and_the_reason_says_the_gain() -> None:
    found = offer(deferring(COSTS))
    assert found.layouts
    assert all(layout.zero_bubble for layout in found.layouts)
    assert found.reason is not None
    assert found.reason.startswith("Zero-bubble schedules are searched with p")
    assert found.reason.endswith("times as long as the best with 1F1B")


def test_nothing_is_offered_where_the_profile_has_not_timed_it() -> None:
    solver = Solver(predictor_of(COSTS), limits_of(AMPLE))
    assert ZeroBubbleDimension().further(workload_of(AMPLE, devices=4), solver) is None


def test_a_baseline_with_the_split_of_a_plan_defers_as_many_packs() -> None:
    usual = plan_of("5+1", "0+1", "0+1")
    first, second, third = usual.stages
    layout = replace(usual.layout, zero_bubble=True)
    winner = replace(usual, layout=layout, stages=(first, second, replace(third, most_deferred=1)))
    assert resplit(usual, winner) == winner
