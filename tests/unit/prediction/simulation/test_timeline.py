"""A typical step pass by pass, and its text."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.forecast.gantt import WIDTH, gantt
from autotune.prediction.timeline import Timeline, timeline
from tests.values.search import COSTS, predictor_of
from tests.values.training import plan_of
from trials.costs.layer_costs import LinkCost
from trials.plan import Packed, Padded, Plan

PLAN = plan_of("3+0r1,0", "2+1", "0+3", packing=Packed(qv=12, qt=600, qv_min=12, qt_min=500))
TWO_RANKS = replace(PLAN, layout=replace(PLAN.layout, data=2))
PREDICTOR = predictor_of(replace(COSTS, link=LinkCost(latency_seconds=1e-4, seconds_per_byte=1e-9)))


def timeline_of(plan: Plan) -> Timeline:
    return timeline(PREDICTOR, plan, PREDICTOR.predict(plan))


@pytest.mark.parametrize("plan", [PLAN, TWO_RANKS, plan_of("5+4", packing=PLAN.packing)])
def test_the_timeline_is_that_of_a_step_of_the_prediction(plan: Plan) -> None:
    found, prediction = timeline_of(plan), PREDICTOR.predict(plan)
    assert found.seconds == pytest.approx(prediction.step_seconds[found.step])
    assert found.step == np.argmin(prediction.step_distances)
    middle = np.abs(prediction.step_seconds / prediction.step_seconds.mean() - 1)
    assert middle[found.step] <= np.median(middle)
    assert 0 <= found.data_rank < plan.layout.data


def test_the_slowest_data_rank_is_shown() -> None:
    for samples in (1, 2, 3):
        plan = plan_of("5+4", data=2, packing=Padded(samples=samples))
        found = timeline_of(plan)
        assert found.backward.max() == pytest.approx(found.update[0, 0])


def test_a_stage_never_runs_two_passes_at_once() -> None:
    found = timeline_of(PLAN)
    for stage in range(3):
        spans = np.concatenate((found.forward[:, stage], found.backward[:, stage], found.update[stage][None]))
        spans = spans[np.argsort(spans[:, 0])]
        assert (spans[:, 1] >= spans[:, 0]).all()
        assert (spans[1:, 0] >= spans[:-1, 1] - 1e-12).all()


def test_a_stage_keeps_its_packs_from_forward_to_backward_and_never_more_than_predicted() -> None:
    found, prediction = timeline_of(PLAN), PREDICTOR.predict(PLAN)
    for stage, memory in enumerate(prediction.stage_memory):
        times, kept = found.memory(stage)
        assert (times[0], times[-1]) == (0.0, found.seconds)
        assert kept[[0, -1]] == pytest.approx([memory.static] * 2)
        assert memory.static < kept.max() <= memory.high
    # The last stage has one pack at a time.
    assert found.memory(2)[1].max() - prediction.stage_memory[2].static == pytest.approx(found.kept_bytes[:, 2].max())


def hand_made() -> Timeline:
    """Two stages with two micro-batches in ten seconds."""
    forward = np.array([[[0.0, 1.0], [1.0, 2.0]], [[1.0, 2.0], [4.0, 5.0]]])
    backward = np.array([[[4.0, 6.0], [2.0, 4.0]], [[7.0, 9.0], [5.0, 7.0]]])
    return Timeline(
        step=0,
        data_rank=0,
        forward=forward,
        backward=backward,
        weights=None,
        update=np.array([[9.0, 10.0], [7.0, 8.0]]),
        kept_bytes=np.array([[4.0, 1.0], [6.0, 1.0]]),
        deferred_bytes=np.zeros((2, 2)),
        static_bytes=(100.0, 50.0),
    )


def test_a_text_shows_passes_waiting_and_update_on_an_axis() -> None:
    # 8 columns for the name and 2 for the borders leave 2 a second.
    assert gantt(hand_made(), 30).splitlines() == [
        "stage 0 |0011....AAAA..BBBB##|",
        "stage 1 |..00AAAA11BBBB##....|",
        "         '   '   '   '   '  '",
        "         0 s 2   4   6   8  10",
    ]


def test_memory_grows_in_forward_and_falls_in_backward_passes() -> None:
    times, kept = hand_made().memory(0)
    assert dict(zip(times.tolist(), kept.tolist(), strict=True)) == {
        0.0: 100.0,
        1.0: 104.0,
        2.0: 110.0,
        4.0: 110.0,
        6.0: 106.0,
        7.0: 106.0,
        9.0: 100.0,
        10.0: 100.0,
    }


@pytest.mark.parametrize("scale", [1e-5, 0.03, 1.0, 70.0, 12345.0])
def test_a_text_of_any_time_fits_its_width(scale: float) -> None:
    found = hand_made()
    scaled = replace(found, forward=found.forward * scale, backward=found.backward * scale, update=found.update * scale)
    lines = gantt(scaled).splitlines()
    assert max(map(len, lines)) == WIDTH
    assert [line[:8] for line in lines[:2]] == ["stage 0 ", "stage 1 "]
    assert 3 <= lines[2].count("'") <= 7
