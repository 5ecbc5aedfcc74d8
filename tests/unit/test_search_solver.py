from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.predict.costs import Array, LayerCosts
from autotune.predict.parts import Parts
from autotune.predict.predictor import Predictor
from autotune.search.solver import min_max_ends
from tests.search_values import LANGUAGE_LAYERS, VISION_LAYERS, layer_costs, predictor_of, solver_of
from trials.model.cut import cut
from trials.plan import Layout, Packed, Packing, Padded, Plan, Stage

LAYERS = VISION_LAYERS + LANGUAGE_LAYERS
HEADROOM = 0.97
packings = st.sampled_from([Padded(samples=2), Padded(samples=4), Packed(qv=12, qt=600, qv_min=12, qt_min=500)])
layouts = st.builds(Layout, pipeline=st.integers(1, 4), data=st.integers(1, 2), zero=st.sampled_from([0, 1]))


def splits(layers: int, stages: int) -> list[tuple[int, ...]]:
    """Ends of the stages of every split."""
    return [(*inner, layers) for inner in combinations(range(1, layers), stages - 1)]


@st.composite
def tables(draw: st.DrawFn) -> Array:
    """Small whole numbers, so that there are ties; some cuts do not fit."""
    layers = draw(st.integers(1, 7))
    stages = draw(st.integers(1, min(layers, 4)))
    table = np.full((stages, layers + 1, layers + 1), np.inf)
    for number in range(stages):
        for start, end in combinations(range(layers + 1), 2):
            table[number, start, end] = draw(st.sampled_from([1.0, 2.0, 3.0, 4.0, 5.0, np.inf]))
    return table


@given(tables())
@settings(deadline=None)
def test_the_slowest_stage_is_as_fast_as_in_any_split_and_then_the_total_is_least(table: Array) -> None:
    def times(ends: tuple[int, ...]) -> list[float]:
        return [float(table[number, start, end]) for number, (start, end) in enumerate(pairwise((0, *ends)))]

    best = min((max(times(ends)), sum(times(ends))) for ends in splits(table.shape[1] - 1, len(table)))
    found = min_max_ends(table)
    if best[0] == np.inf:
        assert found is None
    else:
        assert found is not None
        assert (max(times(found)), sum(times(found))) == best


def stage_of(start: int, end: int, recomputed: int) -> Stage:
    vision = min(end, VISION_LAYERS) - min(start, VISION_LAYERS)
    return Stage(
        vision=vision,
        language=end - start - vision,
        recompute_vision=min(recomputed, vision),
        recompute_language=max(0, recomputed - vision),
    )


def fewest_recomputed(
    predictor: Predictor, packing: Packing, layout: Layout, ends: tuple[int, ...], memory: float
) -> Plan | None:
    """The split with the fewest recomputed layers, vision layers first, with which each stage keeps to the memory."""
    counts = [0] * len(ends)
    while True:
        cuts = list(enumerate(pairwise((0, *ends))))
        stages = tuple(stage_of(start, end, counts[number]) for number, (start, end) in cuts)
        plan = Plan(packing=packing, layout=layout, stages=stages)
        needed = predictor.predict(plan).stage_bytes
        over = [number for number, of_stage in enumerate(needed) if of_stage > memory]
        if not over:
            return plan
        for number in over:
            start, end = cuts[number][1]
            if counts[number] == end - start:
                return None
            counts[number] += 1


def slowest_seconds(predictor: Predictor, plan: Plan) -> float:
    mean = predictor.sizes(plan.packing, plan.layout).mean
    forward, backward = predictor.pass_seconds(Parts.of(cut(plan)), mean)
    return float((forward + backward).max())


def a_limit(predictor: Predictor, packing: Packing, layout: Layout, share: float) -> int:
    """From too little for any split to enough for every one."""
    least = solver_of(1 << 50, predictor).least_bytes(packing, layout)
    return round(least * (0.9 + 3 * share))


@given(layer_costs, packings, layouts, st.floats(0, 1))
@settings(deadline=None, max_examples=25)
def test_no_split_that_fits_the_memory_has_a_faster_slowest_stage(
    costs: LayerCosts, packing: Packing, layout: Layout, share: float
) -> None:
    predictor = predictor_of(costs)
    limit = a_limit(predictor, packing, layout, share)
    others = [
        fewest_recomputed(predictor, packing, layout, ends, limit * HEADROOM)
        for ends in splits(LAYERS, layout.pipeline)
    ]
    possible = [slowest_seconds(predictor, plan) for plan in others if plan is not None]
    found = solver_of(limit, predictor).solve(packing, layout)
    if found is None:
        assert not possible
    else:
        assert found in others
        assert slowest_seconds(predictor, found) == pytest.approx(min(possible))


@given(layer_costs, packings, layouts, st.floats(0, 1), st.data())
@settings(deadline=None, max_examples=40)
def test_a_given_split_recomputes_no_more_than_the_memory_asks(
    costs: LayerCosts, packing: Packing, layout: Layout, share: float, data: st.DataObject
) -> None:
    predictor = predictor_of(costs)
    limit = a_limit(predictor, packing, layout, share)
    ends = data.draw(st.sampled_from(splits(LAYERS, layout.pipeline)))
    plan = solver_of(limit, predictor).fit(packing, layout, ends)
    assert plan == fewest_recomputed(predictor, packing, layout, ends, limit * HEADROOM)
    if plan is not None:
        plan.check(vision_layers=VISION_LAYERS, language_layers=LANGUAGE_LAYERS)
        assert max(predictor.predict(plan).stage_bytes) <= limit


@given(layer_costs, packings, layouts)
@settings(deadline=None, max_examples=20)
def test_the_least_bytes_are_those_of_the_leanest_split_with_everything_recomputed(
    costs: LayerCosts, packing: Packing, layout: Layout
) -> None:
    predictor = predictor_of(costs)
    needed = []
    for ends in splits(LAYERS, layout.pipeline):
        stages = tuple(stage_of(start, end, end - start) for start, end in pairwise((0, *ends)))
        needed.append(max(predictor.predict(Plan(packing=packing, layout=layout, stages=stages)).stage_bytes))
    assert solver_of(1, predictor).least_bytes(packing, layout) == pytest.approx(min(needed))


def test_with_memory_to_spare_nothing_is_recomputed_and_without_nothing_fits() -> None:
    packing, layout = Packed(qv=12, qt=600, qv_min=12, qt_min=500), Layout(pipeline=2, data=1, zero=0)
    least = solver_of(1).least_bytes(packing, layout)
    assert solver_of(round(least * HEADROOM)).solve(packing, layout) is None
    tight, ample = solver_of(round(least * 1.05)).solve(packing, layout), solver_of(1 << 50).solve(packing, layout)
    assert tight is not None
    assert ample is not None
    recomputed = [
        [stage.recompute_vision + stage.recompute_language for stage in plan.stages] for plan in (tight, ample)
    ]
    assert sum(recomputed[0]) > 0
    assert recomputed[1] == [0, 0]


def test_the_forward_split_takes_no_account_of_memory_or_of_the_backward_pass() -> None:
    predictor = predictor_of()
    packing, layout = Padded(samples=4), Layout(pipeline=3, data=1, zero=0)
    mean = predictor.sizes(packing, layout).mean

    def slowest(ends: tuple[int, ...]) -> float:
        stages = tuple(stage_of(start, end, 0) for start, end in pairwise((0, *ends)))
        plan = Plan(packing=packing, layout=layout, stages=stages)
        return float(predictor.pass_seconds(Parts.of(cut(plan)), mean)[0].max())

    assert slowest(solver_of(1).forward_ends(packing, layout)) == min(map(slowest, splits(LAYERS, 3)))


def test_a_chain_of_a_large_model_is_split_in_moments() -> None:
    layers, stages = 125, 8
    starts, ends = np.triu_indices(layers + 1, 1)
    table = np.full((stages, layers + 1, layers + 1), np.inf)
    table[:, starts, ends] = ends - starts
    found = min_max_ends(table)
    assert found is not None
    assert max(end - start for start, end in pairwise((0, *found))) == 16
