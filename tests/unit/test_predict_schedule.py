from collections import defaultdict

import numpy as np
import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, TrainSchedule
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from autotune.predict.costs import Array
from autotune.predict.schedule import pipeline_seconds

shapes = st.tuples(st.just(1), st.integers(1, 7), st.integers(1, 5))
"""[steps, micro-batches, stages]"""


def times(shape: tuple[int, ...]) -> st.SearchStrategy[Array]:
    return arrays(np.float64, shape, elements=st.floats(0.001, 100))


both = shapes.flatmap(lambda shape: st.tuples(times(shape), times(shape)))


def brute_force(forward: Array, backward: Array) -> float:
    """Lets each stage run the instructions of DeepSpeed's own schedule, one pass at a time."""
    count, stages = forward.shape
    waiting = {}
    for stage in range(stages):
        instructions = [each for step in TrainSchedule(count, stages, stage).steps() for each in step]
        waiting[stage] = [type(each) for each in instructions if isinstance(each, ForwardPass | BackwardPass)]
    clock: dict[int, float] = defaultdict(float)
    done: dict[tuple[type, int], list[float]] = defaultdict(list)
    while any(waiting.values()):
        for stage in range(stages):
            if not waiting[stage]:
                continue
            kind = waiting[stage][0]
            number, giver = len(done[kind, stage]), stage - 1 if kind is ForwardPass else stage + 1
            if 0 <= giver < stages and len(done[kind, giver]) <= number:
                continue
            ready = done[kind, giver][number] if 0 <= giver < stages else 0.0
            seconds = (forward if kind is ForwardPass else backward)[number, stage]
            clock[stage] = max(clock[stage], ready) + seconds
            done[kind, stage].append(clock[stage])
            waiting[stage].pop(0)
    return max(clock.values())


@given(both)
@settings(deadline=None, max_examples=60)
def test_a_step_takes_as_long_as_deepspeeds_own_schedule(pair: tuple[Array, Array]) -> None:
    forward, backward = pair
    assert pipeline_seconds(forward, backward)[0] == pytest.approx(brute_force(forward[0], backward[0]))


@pytest.mark.parametrize(("count", "stages"), [(1, 1), (8, 1), (8, 4), (4, 4), (2, 4), (1, 3)])
def test_equal_stages_take_the_textbook_time(count: int, stages: int) -> None:
    forward, backward = np.full((1, count, stages), 2.0), np.full((1, count, stages), 5.0)
    assert pipeline_seconds(forward, backward)[0] == pytest.approx((count + stages - 1) * 7.0)


@given(both, st.data())
@settings(deadline=None, max_examples=60)
def test_a_slower_pass_never_ends_a_step_sooner(pair: tuple[Array, Array], data: st.DataObject) -> None:
    forward, backward = pair
    slower = [side + data.draw(arrays(np.float64, side.shape, elements=st.floats(0, 10))) for side in pair]
    assert pipeline_seconds(*slower)[0] >= pipeline_seconds(forward, backward)[0] - 1e-9


@given(st.integers(1, 7).flatmap(lambda count: st.tuples(times((1, count, 1)), times((1, count, 1)))))
@settings(deadline=None, max_examples=30)
def test_one_stage_takes_the_sum_of_its_passes(pair: tuple[Array, Array]) -> None:
    assert pipeline_seconds(*pair)[0] == pytest.approx(sum(side.sum() for side in pair))


def test_steps_are_independent_of_each_other() -> None:
    random = np.random.default_rng(0)
    forward, backward = random.random((2, 5, 3, 2))
    alone = [pipeline_seconds(forward[step : step + 1], backward[step : step + 1])[0] for step in range(5)]
    assert pipeline_seconds(forward, backward).tolist() == alone
