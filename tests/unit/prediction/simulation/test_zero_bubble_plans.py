"""Deferred weight gradients in predictions: time, memory of each stage, and the timeline."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.forecast.gantt import gantt, legend
from autotune.prediction.simulation.zero_bubble import waiting_from
from autotune.prediction.timeline import timeline
from tests.values.search import COSTS, deferring, predictor_of
from tests.values.training import plan_of
from trials.costs.coefficients import times
from trials.plan import Packed, Plan

PACKS = Packed(qv=6, qt=300, qv_min=6, qt_min=250, packer="best-fit")
PREDICTOR = predictor_of(deferring(COSTS))


def deferred(plan: Plan) -> Plan:
    return replace(plan, layout=replace(plan.layout, zero_bubble=True))


def test_steps_are_shorter_by_what_stages_waited_and_parts_still_sum_to_them() -> None:
    usual = plan_of("3+0", "2+1", "0+3", packing=PACKS)
    one, other = PREDICTOR.predict(usual), PREDICTOR.predict(deferred(usual))
    assert other.epoch_seconds < one.epoch_seconds
    assert other.breakdown.seconds == pytest.approx(other.step_seconds)
    assert other.breakdown.totals["bubble"] < one.breakdown.totals["bubble"]
    assert other.breakdown.totals["ideal"] == pytest.approx(one.breakdown.totals["ideal"])


def test_what_deferring_adds_to_passes_is_no_padding() -> None:
    usual = plan_of("3+0", "2+1", "0+3", packing=PACKS)
    costs = deferring(COSTS)
    slower = ((kind, replace(cost, deferral_seconds=times(cost.backward_seconds, 0.1))) for kind, cost in costs.layers)
    other = predictor_of(replace(costs, layers=tuple(slower))).predict(deferred(usual)).breakdown.totals
    one = PREDICTOR.predict(usual).breakdown.totals
    assert other["ideal"] > 1.01 * one["ideal"]
    assert other["padding"] == pytest.approx(one["padding"])


def test_recomputed_layers_defer_nothing() -> None:
    plan = plan_of("3+0r3,0", "2+1r2,1", "0+3r0,3", packing=PACKS)
    one, other = PREDICTOR.predict(plan), PREDICTOR.predict(deferred(plan))
    assert other.step_seconds == pytest.approx(one.step_seconds)
    for usual, deferring_stage in zip(one.stage_bytes, other.stage_bytes, strict=True):
        assert deferring_stage == pytest.approx(usual)


def test_a_stage_holds_at_most_as_many_packs_as_the_first() -> None:
    for count, stages in ((1, 3), (4, 4), (9, 4), (5, 2)):
        for stage in range(stages):
            for most in range(stage + 1):
                for number, first in enumerate(waiting_from(count, stages, stage, most)):
                    in_flight = min(stages - stage, count - number)
                    assert number - first <= most
                    assert number - first + in_flight <= min(stages, count)


def test_memory_is_that_of_the_timeline_and_the_first_stage_needs_no_more() -> None:
    usual = plan_of("2+0", "3+1", "0+3", packing=PACKS)
    one, other = PREDICTOR.predict(usual), PREDICTOR.predict(deferred(usual))
    assert other.stage_bytes[0] == pytest.approx(one.stage_bytes[0])
    assert other.stage_bytes[2] > one.stage_bytes[2]
    line = timeline(PREDICTOR, deferred(usual), other)
    assert line.weights is not None
    for stage in range(3):
        times, held = line.memory(stage)
        assert held[[0, -1]] == pytest.approx([line.static_bytes[stage]] * 2)
        assert held.max() <= other.stage_memory[stage].high
        assert (np.diff(times) >= 0).all()
    assert "a to j" in legend(line)
    assert any(letter in gantt(line).splitlines()[2] for letter in "abcdefghij")


def test_a_stage_that_defers_fewer_packs_needs_fewer_bytes_and_one_that_defers_none_those_of_1f1b() -> None:
    usual = plan_of("2+0", "3+1", "0+3", packing=PACKS)
    whole = deferred(usual)
    fewer, none = (
        replace(whole, stages=(*whole.stages[:2], replace(whole.stages[2], most_deferred=most))) for most in (1, 0)
    )
    of_1f1b, least, less, most = (PREDICTOR.predict(plan).stage_bytes for plan in (usual, none, fewer, whole))
    assert of_1f1b[2] == pytest.approx(least[2])
    assert least[2] < less[2] < most[2]
    assert least[:2] == less[:2] == most[:2]
    line = timeline(PREDICTOR, fewer, PREDICTOR.predict(fewer))
    assert line.memory(2)[1].max() <= less[2] * 1.01
    packs = fewer.packing, fewer.layout
    seconds = PREDICTOR.times.plan_seconds(none, PREDICTOR.sizes(*packs))
    assert seconds.weights[:, 1].all()
    assert not seconds.weights[:, 2].any()


def test_plans_together_need_what_each_needs_alone() -> None:
    plans = [deferred(plan_of(*stages, packing=PACKS)) for stages in (("2+0", "3+1", "0+3"), ("3+0", "2+1", "0+3"))]
    predictions = [*map(PREDICTOR.predict, plans)]
    assert PREDICTOR.plans_memory(plans) == [prediction.stage_memory for prediction in predictions]
    assert PREDICTOR.plans_bytes(plans) == [prediction.stage_bytes for prediction in predictions]
