from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from autotune.prediction.columns import EVERY, TARGETS
from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.prediction.sizes import EpochSizes
from tests.values.exchanges import averages, exchanging, of_weights
from tests.values.search import BATCH, COSTS, INDEX, deferring, epoch_of, predictor_of
from tests.values.training import PACKED, plan_of
from trials.arrays import Floats
from trials.costs.coefficients import KINDS, times
from trials.costs.layer import LayerCost
from trials.costs.layer_costs import LayerCosts
from trials.engine import static_memory
from trials.engine.static_memory import stages_static_bytes, static_bytes
from trials.model.cut import cut
from trials.plan import Layout, ZeroStage

zeros: st.SearchStrategy[ZeroStage] = st.sampled_from([0, 1, 2, 3])


@given(st.lists(st.integers(0, 1 << 40), max_size=8), st.sampled_from([2, 4]), st.sampled_from([1, 2, 3, 8, 64]), zeros)
def test_static_bytes_of_many_stages_are_those_of_each(
    parameters: list[int], element_bytes: int, data: int, zero: ZeroStage
) -> None:
    layout = Layout(pipeline=1, data=data, zero=zero)
    counts = np.array(parameters, dtype=np.float64)
    together = stages_static_bytes(counts, counts // 3, element_bytes=element_bytes, layout=layout).tolist()
    assert together == [static_bytes(count, element_bytes, layout, frozen=count // 3) for count in parameters]
    assert together == [_exact(count, count // 3, element_bytes, data, zero) for count in parameters]


def _exact(parameters: int, frozen: int, element_bytes: int, data: int, zero: int) -> int:
    trained = parameters - frozen
    share = Fraction(trained, data)
    weights = element_bytes * (Fraction(parameters, data) if zero == 3 else parameters)
    gradients = 4 * (share if zero >= 2 else trained)
    return round(weights + gradients + (12 * share if zero else 8 * trained))


@pytest.mark.parametrize(("parameters", "expected"), [(1, 6 + 2), (3, 18 + 4), (5, 30 + 8)])
def test_a_half_byte_is_rounded_to_the_even_one(parameters: int, expected: int) -> None:
    layout = Layout(pipeline=1, data=8, zero=1)
    assert static_bytes(parameters, 2, layout) == expected


@pytest.mark.parametrize(
    ("layout", "of_float32", "of_bfloat16"),
    [
        (Layout(pipeline=1, data=2, zero=0), 0, None),
        (Layout(pipeline=1, data=1, zero=1), 0, 0),
        (Layout(pipeline=1, data=4, zero=1, reduce_within=2), 4, 0),
        (Layout(pipeline=1, data=2, zero=2), 0, 0),
        (Layout(pipeline=1, data=2, zero=3), 0, 0),
        (Layout(pipeline=2, data=2, zero=1), 0, 0),
    ],
)
def test_a_device_holds_the_buffer_for_gradients_in_backward_passes(
    layout: Layout, of_float32: int, of_bfloat16: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def expected(costs: LayerCosts, element_bytes: int, bucket: int) -> Floats:
        monkeypatch.setattr(static_memory, "BUCKET", bucket)
        predictor = Predictor(costs, epoch_of(INDEX), element_bytes)
        plan = plan_of(*(("5+0", "0+4") if layout.pipeline == 2 else ("5+4",)), packing=PACKED)
        parts = Parts.of(cut(plan))
        return predictor.memory.expected(parts, layout, np.arange(len(parts)), predictor.sizes(PACKED, layout))

    layers = tuple((kind, replace(cost, transient_bytes=(0, 0, 0, 1000))) for kind, cost in COSTS.layers)
    on_host, bucket = exchanging(COSTS, averages(1e-9, 4, within=2)), 50_000_000
    on_device = replace(on_host, layers=layers)
    for element_bytes, of_element in ((4, of_float32), (2, of_bfloat16)):
        if of_element is not None:
            further = [
                expected(costs, element_bytes, bucket) - expected(costs, element_bytes, 0)
                for costs in (on_device, on_host)
            ]
            assert further[0] == pytest.approx(bucket * of_element)
            assert further[1] == pytest.approx(0)


@pytest.mark.parametrize("zero", [1, 3])
def test_each_kind_of_layer_widens_the_range_of_a_stage_by_the_error_of_its_own_bytes(zero: ZeroStage) -> None:
    """Also where a kind that keeps little has a large one."""
    errors = dict(zip(KINDS, (0.3, 0.01, 0.2, 0.02, 5.0), strict=True))
    weights = of_weights(4, (1e-4,) * 5, 1e-9)
    base = exchanging(COSTS, *weights) if zero == 3 else COSTS
    erring = replace(base, layers=tuple((k, replace(cost, bytes_error=errors[k])) for k, cost in base.layers))
    more = replace(base, layers=tuple((k, _keeping(cost, 1 + errors[k])) for k, cost in base.layers))
    plan = plan_of("5+4", data=4, zero=zero, packing=PACKED)
    (found,), (most,) = (predictor_of(costs).predict(plan).stage_memory for costs in (erring, more))
    unmodelled = 0.01 * (found.expected - found.static)
    assert found.high == pytest.approx(most.expected + unmodelled)
    assert found.low == pytest.approx(2 * found.expected - found.high)
    assert found.high - found.expected < 0.5 * (found.expected - found.static)


def test_only_the_last_stage_has_candidates_that_targets_tell_apart() -> None:
    asked = set[tuple[int, tuple[int, ...]]]()

    class AskedSizes(EpochSizes):
        @override
        def heaviest(self, in_flight: int, columns: tuple[int, ...] = EVERY) -> Floats:
            asked.add((in_flight, columns))
            return super().heaviest(in_flight, columns)

    plan = plan_of("5+0", "0+2", "0+2", packing=PACKED)
    found = Predictor(COSTS, epoch_of(INDEX, BATCH), 4, sizes=AskedSizes).predict(plan)
    assert found.stage_bytes == predictor_of().predict(plan).stage_bytes
    assert {in_flight for in_flight, _ in asked} == {1, 2, 3}
    assert {in_flight for in_flight, columns in asked if TARGETS in columns} == {1}


def test_the_memory_of_a_plan_is_predicted_once() -> None:
    predictor, plan = predictor_of(), plan_of("5+0", "0+4", packing=PACKED)
    assert predictor.plans_memory((plan,))[0] is predictor.plans_memory((plan, plan))[1]


def test_alike_stages_of_plans_of_an_epoch_are_computed_once() -> None:
    """Each level of bytes by itself, and what a stage defers or recomputes tells it apart."""
    computed = []

    class CountedSizes(EpochSizes):
        @override
        def in_chunks(self, head: LayerCost) -> EpochSizes:
            computed.append(self)
            return super().in_chunks(head)

    costs = deferring(replace(COSTS, layers=tuple((k, replace(cost, bytes_error=0.1)) for k, cost in COSTS.layers)))
    predictor = Predictor(costs, epoch_of(INDEX, BATCH), 4, sizes=CountedSizes)
    plan = plan_of("5+0", "0+2", "0+2", packing=PACKED)
    plan = replace(plan, layout=replace(plan.layout, zero_bubble=True))
    embeds, layers, ends = plan.stages
    changed = [
        replace(plan, stages=(embeds, other, ends))
        for other in (replace(layers, most_deferred=0), replace(layers, recompute_language=1))
    ]
    found = predictor.plans_bytes((plan,))
    assert len(computed) == 3
    found += predictor.plans_bytes(changed)
    assert len(computed) == 5
    intervals = predictor.plans_memory((plan, *changed))
    assert len(computed) == 10
    assert found == [tuple(stage.expected for stage in stages) for stages in intervals]
    assert intervals == [predictor_of(costs).predict(each).stage_memory for each in (plan, *changed)]
    assert len({stages[1] for stages in found}) == 3


def _keeping(cost: LayerCost, factor: float) -> LayerCost:
    return replace(cost, kept_bytes=times(cost.kept_bytes, factor), output_bytes=times(cost.output_bytes, factor))
