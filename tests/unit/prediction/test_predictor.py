from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.prediction.parts import Parts
from tests.values.data import index_of, lengths
from tests.values.memory import stored_bytes
from tests.values.parameters import examples
from tests.values.search import (
    BATCH,
    COSTS,
    INDEX,
    by_size,
    costs_of,
    frozen_vision,
    layer_cost,
    layer_costs,
    predictor_of,
)
from tests.values.solver import selecting
from tests.values.training import plan_of
from trials.costs.coefficients import KINDS
from trials.costs.layer_costs import LayerCosts, LinkCost, LoadCost
from trials.engine.static_memory import static_bytes
from trials.model.cut import Cut, cut
from trials.plan import Packed, Packing, Padded, Plan, ZeroStage

PACKED = Packed(qv=12, qt=600, qv_min=12, qt_min=500)
FREE = layer_cost((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), parameters=0)

SELECTIVE = [(0.5, 0.6, 0.4)] * len(KINDS)


@st.composite
def stage_plans(draw: st.DrawFn) -> Plan:
    """Plans of 5 vision and 4 language layers."""
    inner = draw(st.sets(st.integers(1, 8), max_size=3))
    ends = [*sorted(inner), 9]
    texts = []
    for start, end in zip([0, *ends], ends, strict=False):
        vision, language = min(end, 5) - min(start, 5), max(end, 5) - max(start, 5)
        whole = draw(st.integers(0, vision)), draw(st.integers(0, language))
        selective = draw(st.integers(0, vision - whole[0])), draw(st.integers(0, language - whole[1]))
        texts.append(f"{vision}+{language}r{whole[0]},{whole[1]}s{selective[0]},{selective[1]}")
    packing: Packing = PACKED if draw(st.booleans()) else Padded(samples=2)
    return plan_of(*texts, packing=packing)


def live_bytes(costs: LayerCosts, part: Cut, packs: np.ndarray) -> float:
    """Return the peak bytes in the backward pass of the first of `packs` while the others wait for theirs.

    Goes through the chain from its end, layer by layer, freeing what has had its backward pass.
    """
    layers = stored_bytes(costs.__getitem__, part)

    def kept(pack: np.ndarray, upto: int) -> float:
        return sum(float(pack @ stored) for _, stored, _ in layers[:upto])

    most = kept(packs[0], len(layers))
    for number, (*_, again) in enumerate(layers):
        if again is not None:
            most = max(most, kept(packs[0], number) + float(packs[0] @ again))
    return most + sum(kept(pack, len(layers)) for pack in packs[1:])


def brute_force_bytes(
    costs: LayerCosts, plan: Plan, number: int, rows: list[tuple[int, int]], batch: int = BATCH
) -> float:
    """Live bytes of a stage over every pack of every step, and its static bytes."""
    predictor = predictor_of(costs, index_of(rows), batch)
    sizes = predictor.sizes(plan.packing, plan.layout)
    part, epoch = cut(plan)[number], sizes.epoch
    most = 0.0
    for step in range(epoch.steps):
        for packs in epoch.rows(step).T:
            for first in range(len(packs)):
                in_flight = packs[first : first + plan.layout.pipeline - number]
                most = max(most, live_bytes(costs, part, sizes.table[in_flight]))
    counts = (int(part.embeds), len(part.vision), int(part.projects), len(part.language), int(part.heads))
    parameters = sum(count * costs[kind].parameters for kind, count in zip(KINDS, counts, strict=True))
    return static_bytes(parameters, 4, plan.layout) + most


@given(stage_plans(), layer_costs, lengths, st.sampled_from([2, 4, BATCH]))
@settings(max_examples=examples(150))
def test_the_memory_of_every_stage_is_predicted_exactly(
    plan: Plan, costs: LayerCosts, rows: list[tuple[int, int]], batch: int
) -> None:
    costs = selecting(costs, SELECTIVE)
    predicted = predictor_of(costs, index_of(rows), batch).predict(plan).stage_bytes
    for number in range(plan.layout.pipeline):
        assert predicted[number] == pytest.approx(brute_force_bytes(costs, plan, number, rows, batch))


def one_more_recomputed(plan: Plan) -> list[tuple[int, Plan]]:
    """(changed stage, plan) for each way to recompute one layer more."""
    found = []
    for number, stage in enumerate(plan.stages):
        for kind in ("vision", "language"):
            count, selective = (getattr(stage, f"{how}_{kind}") for how in ("recompute", "selective"))
            left = getattr(stage, kind) - count - 1
            # The last layer needs more when it is recomputed as a whole in place of selectively.
            if left > 0 or (left == 0 and not selective):
                stages = list(plan.stages)
                more = {f"recompute_{kind}": count + 1, f"selective_{kind}": min(selective, left)}
                stages[number] = replace(stage, **more)
                found.append((number, replace(plan, stages=tuple(stages))))
    return found


@given(stage_plans(), layer_costs, st.tuples(st.integers(0, 12), st.integers(1, 300)))
@settings(max_examples=examples(60))
def test_more_recompute_never_needs_more_memory_for_equal_packs(
    plan: Plan, costs: LayerCosts, row: tuple[int, int]
) -> None:
    predictor = predictor_of(selecting(costs, SELECTIVE), index_of([row] * 64))
    plan = replace(plan, packing=Padded(samples=2))
    before = predictor.predict(plan).stage_bytes
    for number, more in one_more_recomputed(plan):
        assert predictor.predict(more).stage_bytes[number] <= before[number] * (1 + 1e-12)


@given(stage_plans(), layer_costs, lengths)
@settings(max_examples=examples(60))
def test_more_recompute_never_needs_more_memory_for_one_pack_in_flight(
    plan: Plan, costs: LayerCosts, rows: list[tuple[int, int]]
) -> None:
    predictor = predictor_of(selecting(costs, SELECTIVE), index_of(rows))
    before = predictor.predict(plan).stage_bytes
    for number, more in one_more_recomputed(plan):
        if number == plan.layout.pipeline - 1:
            assert predictor.predict(more).stage_bytes[number] <= before[number] * (1 + 1e-12)


@given(stage_plans(), layer_costs)
@settings(max_examples=examples(40))
def test_recompute_adds_the_forward_time_of_its_layers_to_the_backward_pass(plan: Plan, costs: LayerCosts) -> None:
    predictor = predictor_of(costs)
    table = predictor.sizes(plan.packing, plan.layout).table
    forward, backward = predictor.times.pass_seconds(Parts.of(cut(plan)), plan.layout, table)
    kept = replace(
        plan, stages=tuple(replace(stage, recompute_vision=0, recompute_language=0) for stage in plan.stages)
    )
    forward_of_kept, backward_of_kept = predictor.times.pass_seconds(Parts.of(cut(kept)), kept.layout, table)
    assert (forward == forward_of_kept).all()
    for number, stage in enumerate(plan.stages):
        again = stage.recompute_vision * by_size("vision", costs["vision"].forward_seconds)
        again = again + stage.recompute_language * by_size("language", costs["language"].forward_seconds)
        assert backward[:, number] - backward_of_kept[:, number] == pytest.approx(table @ again)


def test_the_stages_together_take_the_chains_time() -> None:
    predictor = predictor_of()
    plan = plan_of("3+0", "2+1", "0+3", packing=PACKED)
    table = predictor.sizes(plan.packing, plan.layout).table
    forward, _ = predictor.times.pass_seconds(Parts.of(cut(plan)), plan.layout, table)
    counts = {"vision_embedding": 1, "vision": 5, "projector": 1, "language": 4, "head": 1}
    chain = sum(counts[kind] * by_size(kind, COSTS[kind].forward_seconds) for kind in KINDS)
    assert forward.sum(axis=1) == pytest.approx(table @ chain)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("data", [1, 2])
def test_without_activations_a_stage_needs_its_static_bytes(zero: ZeroStage, data: int) -> None:
    weights_alone = costs_of(*(replace(FREE, parameters=1000 * (number + 1)) for number in range(5)))
    plan = replace(plan_of("3+0", "2+4"), packing=PACKED)
    plan = replace(plan, layout=replace(plan.layout, data=data, zero=zero))
    first, second = 1000 + 3 * 2000, 2 * 2000 + 3000 + 4 * 4000 + 5000
    states = 8 if zero == 0 else 12 / data
    assert predictor_of(weights_alone).predict(plan).stage_bytes == pytest.approx(
        [count * (4 + 4 + states) for count in (first, second)]
    )


def test_zero_splits_the_optimizer_step_and_data_parallelism_adds_a_reduction() -> None:
    weights_alone = costs_of(*(replace(FREE, parameters=1_000_000) for _ in range(5)))
    predictor = predictor_of(weights_alone)

    def seconds(data: int, zero: ZeroStage) -> float:
        plan = plan_of("5+4")
        layout = replace(plan.layout, data=data, zero=zero)
        return float(predictor.predict(replace(plan, layout=layout)).step_seconds[0])

    parameters = 12e6
    update, reduction = parameters * 2e-9, parameters * 4 * 1e-9
    assert seconds(1, 0) == pytest.approx(update)
    assert seconds(2, 0) == pytest.approx(update + reduction)
    assert seconds(2, 1) == pytest.approx(update / 2 + reduction)


def test_a_step_ends_with_the_stage_whose_passes_and_update_end_last() -> None:
    weights_alone = costs_of(*(replace(FREE, parameters=1_000_000) for _ in range(5)))
    prediction = predictor_of(weights_alone).predict(plan_of("2+0", "3+4"))
    # Stage 1 holds 3 vision and 4 language layers, the projector and the head.
    assert prediction.step_seconds == pytest.approx(9e6 * 2e-9)


def linked(costs: LayerCosts, latency: float, per_byte: float) -> LayerCosts:
    return replace(costs, link=LinkCost(latency_seconds=latency, seconds_per_byte=per_byte))


@pytest.mark.parametrize(("ends", "bytes_of_pack"), [(("3+0", "2+4"), 3e4), (("5+0", "0+4"), 700.0)])
def test_a_stage_sends_what_its_last_layer_hands_on(ends: tuple[str, ...], bytes_of_pack: float) -> None:
    """A vision layer outputs 3e4 bytes per unit; the projector, on the stage of the last one, 700 per token."""
    slow = linked(costs_of(*(replace(cost, forward_seconds=(0, 0, 0, 0)) for _, cost in COSTS.layers)), 0.25, 1e-6)
    predictor = predictor_of(slow)
    plan = plan_of(*ends, packing=PACKED)
    sizes = predictor.sizes(plan.packing, plan.layout)
    size = sizes.table[:, 0 if bytes_of_pack == 3e4 else 1]
    assert predictor.times.pack_seconds(Parts.of(cut(plan)), plan.layout, sizes).sends[:, 0] == pytest.approx(
        0.25 + 1e-6 * bytes_of_pack * size
    )


def test_sending_takes_time_only_between_stages() -> None:
    for plan, slower in ((plan_of("5+4", packing=PACKED), False), (plan_of("3+0", "2+4", packing=PACKED), True)):
        free = predictor_of().predict(plan)
        paid = predictor_of(linked(COSTS, 0.01, 0.0)).predict(plan)
        assert (paid.epoch_seconds > free.epoch_seconds) is slower
        assert free.breakdown.totals["communication"] == pytest.approx(0, abs=1e-9)
        assert paid.breakdown.totals["communication"] == pytest.approx(paid.epoch_seconds - free.epoch_seconds)


@given(stage_plans(), layer_costs)
@settings(max_examples=examples(30))
def test_the_parts_of_an_epoch_sum_to_it(plan: Plan, costs: LayerCosts) -> None:
    plan = replace(plan, layout=replace(plan.layout, data=2))
    prediction = predictor_of(linked(costs, 1e-4, 1e-9)).predict(plan)
    totals = prediction.breakdown.totals
    assert sum(totals.values()) == pytest.approx(prediction.epoch_seconds)
    assert min(totals.values()) >= -1e-9
    recomputes = any(stage.recompute_vision + stage.recompute_language for stage in plan.stages)
    assert (totals["recompute"] > 1e-9) is recomputes


def test_pad_tokens_and_stand_in_tiles_are_padding() -> None:
    a_token_and_a_tile = costs_of(
        FREE,
        layer_cost((1.0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), 0),
        FREE,
        layer_cost((0, 1.0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), 0),
        FREE,
    )
    predictor = predictor_of(a_token_and_a_tile, index_of([(0, 10), (0, 30)]), batch=2)
    padded = predictor.predict(plan_of("5+4", packing=Padded(samples=2))).breakdown.totals
    assert padded["ideal"] == pytest.approx(4 * 3 * 40)
    assert padded["padding"] == pytest.approx(4 * 3 * 20 + 5 * 3)
    joined = predictor.predict(plan_of("5+4", packing=Packed(qv=1, qt=40, qv_min=1, qt_min=40))).breakdown.totals
    assert joined["padding"] == pytest.approx(5 * 3)


def test_a_pack_without_samples_is_padding() -> None:
    equal = costs_of(FREE, FREE, FREE, layer_cost((0, 0, 0, 1.0), (0, 0, 0, 0), (0, 0, 0, 0), 0), FREE)
    plan = plan_of("5+4", data=2, packing=Padded(samples=1))
    totals = predictor_of(equal, index_of([(0, 10)]), batch=1).predict(plan).breakdown.totals
    assert (totals["ideal"], totals["padding"]) == (4 * 3.0 / 2, 4 * 3.0 / 2)


def test_stages_idle_while_they_wait_and_send() -> None:
    equal = costs_of(FREE, FREE, FREE, layer_cost((0, 0, 0, 1.0), (0, 0, 0, 0), (0, 0, 0, 0), 0), FREE)
    index = index_of([(0, 10)] * 4)
    prediction = predictor_of(equal, index, batch=4).predict(plan_of("5+2", "0+2", packing=Padded(samples=1)))
    assert prediction.step_seconds == pytest.approx([(4 + 1) * 2 * 3.0])
    assert prediction.stage_idle == pytest.approx((1 / 5, 1 / 5))
    slower = predictor_of(linked(equal, 1.0, 0.0), index, batch=4).predict(
        plan_of("5+2", "0+2", packing=Padded(samples=1))
    )
    assert slower.idle_share > prediction.idle_share == pytest.approx(1 / 5)
    lonely = predictor_of(equal, index_of([(0, 10)] * 4), batch=4).predict(plan_of("5+4", packing=Padded(samples=1)))
    assert lonely.idle_share == pytest.approx(0)


def test_padding_is_paid_for() -> None:
    only_tokens = costs_of(FREE, FREE, FREE, layer_cost((0, 1.0, 0, 0), (0, 1.0, 0, 0), (0, 1.0, 0, 0), 0), FREE)
    predictor = predictor_of(only_tokens, index_of([(0, 10), (0, 30)]), batch=2)
    padded = predictor.predict(plan_of("5+4", packing=Padded(samples=2)))
    joined = predictor.predict(plan_of("5+4", packing=Packed(qv=1, qt=40, qv_min=1, qt_min=40)))
    # Forward and backward are three times the forward pass of four layers.
    assert padded.step_seconds == pytest.approx([4 * 3 * 60])
    assert joined.step_seconds == pytest.approx([4 * 3 * 40])
    assert (padded.stage_bytes, joined.stage_bytes) == ((4 * 60.0,), (4 * 40.0,))


@pytest.mark.parametrize(("batch", "in_flight"), [(1, (1, 1, 1)), (2, (2, 2, 1)), (8, (3, 2, 1))])
def test_a_stage_keeps_as_many_packs_as_stages_are_left_but_no_more_than_there_are(
    batch: int, in_flight: tuple[int, ...]
) -> None:
    one_byte = layer_cost((0, 0, 0, 0), (0, 0, 0, 1.0), (0, 0, 0, 1.0), 0)
    predictor = predictor_of(costs_of(FREE, one_byte, FREE, one_byte, FREE), index_of([(1, 10)] * 16), batch)
    prediction = predictor.predict(plan_of("3+0", "2+1", "0+3", packing=Padded(samples=1)))
    assert prediction.stage_bytes == tuple(3.0 * count for count in in_flight)


def test_a_step_waits_for_the_slowest_data_rank() -> None:
    only_tokens = costs_of(FREE, FREE, FREE, layer_cost((0, 1.0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), 0), FREE)
    predictor = predictor_of(only_tokens, index_of([(0, 10), (0, 30)]), batch=2)
    prediction = predictor.predict(plan_of("5+4", data=2, packing=Padded(samples=1)))
    assert prediction.step_seconds == pytest.approx([4 * 3 * 30])


def test_an_epoch_takes_the_sum_of_its_steps() -> None:
    prediction = predictor_of().predict(plan_of("3+0", "2+4", packing=PACKED))
    sizes = predictor_of().sizes(PACKED, plan_of("3+0", "2+4").layout)
    assert len(prediction.step_seconds) == sizes.epoch.steps > 10
    assert prediction.epoch_seconds == pytest.approx(sum(prediction.step_seconds))
    assert prediction.batch_deviation == sizes.epoch.batch_deviation
    assert sizes.epoch.packs.counts.sum() == len(INDEX)


def test_the_first_stage_loads_pixels_and_the_last_one_labels() -> None:
    nothing = costs_of(
        FREE, FREE, FREE, FREE, FREE, loading=LoadCost(pixels_seconds=(0, 0, 0, 5.0), labels_seconds=(0, 0, 0, 2.0))
    )
    predictor = predictor_of(nothing, index_of([(0, 10)] * 4), batch=4)
    three = predictor.predict(plan_of("2+0", "3+1", "0+3", packing=Padded(samples=1)))
    assert three.step_seconds == pytest.approx([4 * 5.0 + 2.0])
    assert three.stage_idle == pytest.approx((2 / 22, 1.0, 14 / 22))
    alone = predictor.predict(plan_of("5+4", packing=Padded(samples=1)))
    assert alone.breakdown.totals["loading"] == pytest.approx(4 * 5.0)


def test_a_frozen_vision_tower_costs_a_forward_pass_and_its_weights() -> None:
    costs = replace(frozen_vision(), link=LinkCost(latency_seconds=1e-3, seconds_per_byte=1e-9))
    predictor, plan = predictor_of(costs), plan_of("3+0r3,0", "2+4")
    prediction, parts = predictor.predict(plan), Parts.of(cut(plan))
    seconds = predictor.times.pack_seconds(parts, plan.layout, predictor.sizes(plan.packing, plan.layout))
    assert not seconds.backward[:, 0].any()
    assert seconds.backward[:, 1].all()
    assert seconds.sends.all()
    assert not seconds.returns.any()
    # The weights of the embedding and three layers, and nothing else.
    assert prediction.stage_bytes[0] == 4 * 4 * COSTS["vision"].parameters
    inner = plan_of("5+2", "0+2")
    seconds = predictor.times.pack_seconds(
        Parts.of(cut(inner)), plan.layout, predictor.sizes(plan.packing, plan.layout)
    )
    assert (seconds.returns == seconds.sends).all()
