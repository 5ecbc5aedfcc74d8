"""Plans with ZeRO 3 that gather weights once where memory is left: the most that fits, and joint with recomputation."""

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from autotune.plan_text import plan_text
from autotune.prediction.predictor import Predictor
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from tests.values.exchanges import exchanging, of_weights
from tests.values.parameters import examples
from tests.values.solver import problems
from tests.values.training import plan_of, stage
from trials.errors import InvalidPlan
from trials.plan import Layout, Packing, Plan

LAYOUT = Layout(pipeline=1, data=2, zero=3)


@st.composite
def sharded_problems(draw: st.DrawFn) -> tuple[Predictor, Limits, Packing]:
    """Random problems of one stage whose weights are in shards, with memory for some of what may stay."""
    predictor, limits, packing, _ = draw(problems(most_stages=1).filter(lambda found: found[3].data > 1))
    parameters = draw(st.integers(0, 3_000_000))
    costs = replace(
        predictor.costs,
        layers=tuple((kind, replace(cost, parameters=parameters)) for kind, cost in predictor.costs.layers),
    )
    gathers = draw(st.tuples(*[st.floats(0, 0.1)] * 5))
    *of_layers, scatter = of_weights(LAYOUT.data, gathers, draw(st.floats(0, 1e-9)))
    scatter = replace(scatter, hidden_share=draw(st.floats(0, 1)))
    predictor = predictor.with_costs(exchanging(costs, *of_layers, scatter))
    least = Solver(predictor, limits).least_bytes(packing, LAYOUT)
    return predictor, replace(limits, memory_limit_bytes=round(least * draw(st.floats(1, 3)))), packing


def every_plan(packing: Packing, limits: Limits) -> list[Plan]:
    """Return the plan of each number of recomputed layers and of layers whose weights stay."""
    vision, language = limits.vision_layers, limits.language_layers
    texts = (
        f"{vision}+{language}r{first},{second}g{once}"
        for first in range(vision + 1)
        for second in range(language + 1)
        for once in range(limits.layers + 1)
    )
    return [Plan(packing=packing, layout=LAYOUT, stages=(stage(text),)) for text in texts]


# Always the same: of a hundred such problems about one has a plan that is faster by more. Shrinking would take minutes.
@given(sharded_problems())
@settings(max_examples=examples(40), phases=(Phase.generate,), derandomize=True)
def test_hardly_any_plan_that_fits_is_faster(case: tuple[Predictor, Limits, Packing]) -> None:
    predictor, limits, packing = case
    solver = Solver(predictor, limits)
    plans = every_plan(packing, limits)
    peaks = [stages[0].expected for stages in predictor.plans_memory(plans)]
    fitting = [plan for plan, peak in zip(plans, peaks, strict=True) if peak <= limits.usable_bytes]
    found = solver.solve(packing, LAYOUT)
    assert (found is None) == (not fitting)
    if found is not None:
        assert solver.fullest(found)[0] <= limits.usable_bytes
        (seconds,) = solver.epoch_seconds([found])
        assert seconds <= min(solver.epoch_seconds(fitting)) * 1.01
        assert not solver.keeps_batch(packing, LAYOUT) or solver.least_seconds(packing, LAYOUT) <= seconds * 1.01


def test_weights_in_shards_alone_can_stay() -> None:
    with pytest.raises(InvalidPlan, match="gathered_once 3 needs weights in shards, and only ZeRO 3 with several"):
        plan_of("4+2g3", data=2, zero=2)
    with pytest.raises(InvalidPlan, match="cannot gather 7 of them once; use gathered_once 0 to 6"):
        plan_of("4+2g7", data=2, zero=3)


def test_a_plan_says_how_many_layers_it_gathers_once() -> None:
    assert "ZeRO 3 gathering 5 layers once; split" in plan_text(plan_of("4+2g5", data=2, zero=3))
    assert plan_of("4+2g0", data=2, zero=3).id == plan_of("4+2", data=2, zero=3).id
