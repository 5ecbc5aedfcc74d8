from collections import defaultdict, deque

import numpy as np
import pytest
from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    PipeInstruction,
    RecvActivation,
    RecvGrad,
    SendActivation,
    SendGrad,
    TrainSchedule,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from autotune.prediction.simulation.schedule import simulate, simulate_plans, trace
from autotune.prediction.simulation.zero_bubble import DeferredWeights
from tests.values.parameters import examples
from trials.arrays import Floats
from trials.engine.zero_bubble import ComputeWeightGradients, ZeroBubbleSchedule

PARTNERS = {SendActivation: RecvActivation, RecvActivation: SendActivation, SendGrad: RecvGrad, RecvGrad: SendGrad}
TOWARDS = {SendActivation: 1, RecvActivation: -1, SendGrad: -1, RecvGrad: 1}
Times = tuple[Floats, Floats, Floats]

shapes = st.tuples(st.integers(1, 7), st.integers(1, 5))
"""[micro-batches, stages]"""


def times(shape: tuple[int, int]) -> st.SearchStrategy[Times]:
    """(forward, backward, sends, returns) of one step."""
    count, stages = shape
    seconds = st.floats(0.0, 100)
    of_stages = arrays(np.float64, (1, count, stages), elements=seconds)
    of_links = arrays(np.float64, (1, count, stages - 1), elements=seconds)
    return st.tuples(of_stages, of_stages, of_links, of_links)


steps = shapes.flatmap(times)


def events(
    forward: Floats, backward: Floats, sends: Floats, returns: Floats, weights: DeferredWeights | None = None
) -> tuple[list[float], dict[tuple[type[PipeInstruction], int, int], float]]:
    """(clock of each stage, end of each (kind of pass, micro-batch, stage)), one instruction at a time.

    Every stage runs the instructions of DeepSpeed's own schedule, or where it defers some the engine's own. An
    exchange begins when both stages have come to it.
    """
    count, stages = forward.shape
    seconds = {ForwardPass: forward, BackwardPass: backward, ComputeWeightGradients: weights and weights.seconds}
    wanted = (*PARTNERS, *seconds)
    schedules = [
        ZeroBubbleSchedule(count, stages, stage, most_deferred=most) if most else TrainSchedule(count, stages, stage)
        for stage, most in enumerate(weights.most if weights else [0] * stages)
    ]
    todo = [deque(each for step in own.steps() for each in step if type(each) in wanted) for own in schedules]
    clock = [0.0] * stages
    done: dict[tuple[type[PipeInstruction], int], int] = defaultdict(int)
    ends = {}
    while any(todo):
        before = sum(map(len, todo))
        for stage, instructions in enumerate(todo):
            while instructions and (kind := type(instructions[0])) not in PARTNERS:
                number, taken = done[kind, stage], seconds[kind]
                assert taken is not None
                clock[stage] += taken[number, stage]
                ends[kind, number, stage] = clock[stage]
                done[kind, stage] += 1
                instructions.popleft()
            if not instructions:
                continue
            other = stage + TOWARDS[kind]
            if todo[other] and type(todo[other][0]) is PARTNERS[kind]:
                number = done[kind, stage]
                link = returns if kind in (SendGrad, RecvGrad) else sends
                both = max(clock[stage], clock[other]) + link[number, min(stage, other)]
                clock[stage] = clock[other] = both
                done[kind, stage] += 1
                done[PARTNERS[kind], other] += 1
                instructions.popleft()
                todo[other].popleft()
        assert sum(map(len, todo)) < before, "deadlock"
    return clock, ends


@given(steps)
@settings(max_examples=examples(150))
def test_every_pass_ends_when_it_does_in_deepspeeds_own_schedule(step: Times) -> None:
    clock, ends = events(*(side[0] for side in step))
    schedule, passes = simulate(*step), trace(*step)
    assert schedule.ends[0] == pytest.approx(clock)
    for (kind, number, stage), end in ends.items():
        side = passes.backward_ends if kind is BackwardPass else passes.forward_ends
        assert side[0, number, stage] == pytest.approx(end)


@given(shapes.filter(lambda shape: shape[1] > 1).flatmap(times), st.floats(0, 1), st.data())
@settings(max_examples=examples(150))
def test_deferred_weight_gradients_end_when_they_do_in_the_engines_schedule(
    step: Times, share: float, data: st.DataObject
) -> None:
    forward, backward, *links = step
    most = np.array([data.draw(st.integers(0, stage)) for stage in range(forward.shape[2])])
    weights = DeferredWeights(share * backward * (most > 0), most)
    of_step = weights._replace(seconds=weights.seconds[0])
    clock, ends = events(forward[0], backward[0] - of_step.seconds, links[0][0], links[1][0], of_step)
    schedule, passes = simulate(*step, weights=weights), trace(*step, weights=weights)
    assert schedule.ends[0] == pytest.approx(clock)
    assert passes.weight_ends is not None
    sides = {
        ForwardPass: passes.forward_ends,
        BackwardPass: passes.backward_ends,
        ComputeWeightGradients: passes.weight_ends,
    }
    for (kind, number, stage), end in ends.items():
        assert sides[kind][0, number, stage] == pytest.approx(end)
    assert len(ends) == 2 * forward.size + forward.shape[1] * (most > 0).sum()


@pytest.mark.parametrize(("count", "stages"), [(4, 2), (8, 2), (4, 4), (8, 4), (16, 4)])
def test_equal_stages_have_the_bubble_of_zb_h1(count: int, stages: int) -> None:
    forward, backward, weights = (np.full((1, count, stages), seconds) for seconds in (2.0, 4.5, 2.0))
    found = simulate(forward, backward, weights=DeferredWeights(weights, np.arange(stages))).seconds[0]
    assert found == pytest.approx(count * 6.5 + (stages - 1) * (2.0 + 2.5 - 2.0))
    assert simulate(forward, backward).seconds[0] == pytest.approx((count + stages - 1) * 6.5)


@pytest.mark.parametrize(("count", "stages"), [(1, 1), (8, 1), (8, 4), (4, 4), (2, 4), (1, 3)])
def test_equal_stages_take_the_textbook_time(count: int, stages: int) -> None:
    forward, backward = np.full((1, count, stages), 2.0), np.full((1, count, stages), 5.0)
    schedule = simulate(forward, backward)
    assert schedule.seconds == pytest.approx((count + stages - 1) * 7.0)
    assert schedule.idle[0] == pytest.approx([(stages - 1) * 7.0] * stages)


def test_one_pack_pays_every_boundary_twice() -> None:
    forward, backward, sends = np.full((1, 1, 3), 2.0), np.full((1, 1, 3), 5.0), np.array([[[0.25, 1.0]]])
    assert simulate(forward, backward, sends).seconds == pytest.approx(3 * 7.0 + 2 * 1.25)
    assert simulate(forward, backward, sends, 0 * sends).seconds == pytest.approx(3 * 7.0 + 1.25)


def test_a_stage_cannot_run_ahead_of_a_successor_that_has_not_taken_its_states() -> None:
    forward, backward = np.array([[[1.0, 10.0], [1.0, 10.0]]]), np.zeros((1, 2, 2))
    # The second states wait for the first to be through stage 1, and the second backward pass for the second states.
    assert trace(forward, backward).forward_ends[0].T.tolist() == [[1.0, 2.0], [11.0, 21.0]]
    four = np.concatenate((forward, forward), axis=1)
    assert trace(four, np.zeros_like(four)).forward_ends[0, 2, 0] == 12.0


@given(steps, st.data())
@settings(max_examples=examples(60))
def test_a_slower_pass_or_send_never_ends_a_step_sooner(step: Times, data: st.DataObject) -> None:
    slower = [side + data.draw(arrays(np.float64, side.shape, elements=st.floats(0, 10))) for side in step]
    assert (simulate(*slower).ends >= simulate(*step).ends - 1e-9).all()


@given(steps)
@settings(max_examples=examples(60))
def test_no_step_is_faster_than_its_busiest_stage_and_none_slower_than_one_pass_after_the_other(step: Times) -> None:
    schedule = simulate(*step)
    assert (schedule.idle >= -1e-9).all()
    assert schedule.seconds[0] <= sum(side.sum() for side in step) + 1e-9


@given(st.integers(1, 7).flatmap(lambda count: times((count, 1))))
@settings(max_examples=examples(30))
def test_one_stage_takes_the_sum_of_its_passes(step: Times) -> None:
    forward, backward, *_ = step
    assert simulate(forward, backward).seconds[0] == pytest.approx(forward.sum() + backward.sum())


def test_free_sends_change_nothing() -> None:
    forward, backward = np.random.default_rng(0).random((2, 3, 6, 4))
    free = np.zeros((3, 6, 3))
    assert simulate(forward, backward, free).ends.tolist() == simulate(forward, backward).ends.tolist()


def test_steps_are_independent_of_each_other_however_many_there_are() -> None:
    random = np.random.default_rng(0)
    forward, backward = random.random((2, 1300, 5, 3))
    sends = random.random((1300, 5, 2))
    together = simulate(forward, backward, sends).ends
    for step in (0, 511, 512, 1299):
        alone = slice(step, step + 1)
        assert together[step].tolist() == simulate(forward[alone], backward[alone], sends[alone]).ends[0].tolist()


def test_no_steps_take_no_time() -> None:
    assert simulate(*np.zeros((2, 0, 5, 3))).seconds.tolist() == []


@pytest.mark.parametrize(("count", "stages"), [(1, 1), (1, 5), (2, 2), (3, 3), (9, 4), (4, 9)])
def test_plans_of_shared_stages_take_as_long_as_each_alone(count: int, stages: int) -> None:
    random = np.random.default_rng(0)
    shared = random.random((4, 6, count, 3))
    plans = random.integers(0, 6, (5, stages))
    together = simulate_plans(plans, *shared)
    for number, plan in enumerate(plans):
        forward, backward, sends, returns = (side[plan].transpose(2, 1, 0) for side in shared)
        alone = simulate(forward, backward, sends[..., :-1], returns[..., :-1])
        assert together[:, number].T.tolist() == alone.ends.tolist()


@pytest.mark.parametrize(("count", "stages"), [(1, 3), (2, 2), (9, 4), (4, 9)])
def test_plans_that_defer_weight_gradients_take_as_long_as_each_alone(count: int, stages: int) -> None:
    random = np.random.default_rng(0)
    shared = random.random((4, 2 * stages, count, 3))
    # Stage 2 s + 0 or 1 is stage s of each plan.
    plans = 2 * np.arange(stages) + random.integers(0, 2, (5, stages))
    most = random.integers(0, np.repeat(np.arange(stages), 2) + 1)
    weights = DeferredWeights(random.random((3, count, 2 * stages)) * shared[1].T * (most > 0), most)
    together = simulate_plans(plans, *shared, weights=weights)
    for number, plan in enumerate(plans):
        forward, backward, sends, returns = (side[plan].transpose(2, 1, 0) for side in shared)
        own = DeferredWeights(weights.seconds[..., plan], most[plan])
        alone = simulate(forward, backward, sends[..., :-1], returns[..., :-1], weights=own)
        assert pytest.approx(alone.ends, rel=1e-12) == together[:, number].T
