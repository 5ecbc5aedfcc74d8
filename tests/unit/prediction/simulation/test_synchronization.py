"""Data ranks that share packs, compared with DeepSpeed's instructions of all ranks, one event at a time."""

from collections import deque

import numpy as np
import pytest
from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass, PipeInstruction, SendGrad, TrainSchedule
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from autotune.prediction.simulation.schedule import simulate, trace
from autotune.prediction.simulation.synchronization import Sharing, Synchronization
from tests.unit.prediction.simulation.test_schedule import PARTNERS, TOWARDS
from tests.values.parameters import examples
from trials.arrays import Floats

RANKS = 4
Times = tuple[Floats, Floats, Floats, Floats]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Times, Synchronization]:
    """(forward, backward, sends, returns) of one step of all data ranks, [data ranks, micro-batches, stages or links].

    Ranks that share a pack have equal times in it.
    """
    count, stages = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    degrees = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=count, max_size=count))
    sides = []
    for width in (stages, stages, stages - 1, stages - 1):
        side = draw(arrays(np.float64, (RANKS, count, width), elements=st.floats(0.0, 100)))
        for row, degree in enumerate(degrees):
            side[:, row] = np.repeat(side[::degree, row], degree, axis=0)
        sides.append(side)
    meets = [np.array(draw(st.lists(st.booleans(), min_size=stages, max_size=stages))) for _ in range(2)]
    forward, backward, sends, returns = sides
    return (forward, backward, sends, returns), Synchronization(
        degrees=np.array([degrees]), ranks=RANKS, forward=meets[0], backward=meets[1]
    )


class Events:
    """All ranks of a grid, each with its own clock and the instructions of DeepSpeed's schedule that it still has."""

    def __init__(self, times: Times, synchronization: Synchronization) -> None:
        self._times, self._synchronization = times, synchronization
        _, count, stages = times[0].shape
        wanted = (*PARTNERS, ForwardPass, BackwardPass)
        self._todo = {
            (rank, stage): deque(
                type(each)
                for step in TrainSchedule(count, stages, stage).steps()
                for each in step
                if isinstance(each, wanted)
            )
            for rank in range(RANKS)
            for stage in range(stages)
        }
        self._done: dict[tuple[int, int, type[PipeInstruction]], int] = {}
        self.clock = dict.fromkeys(self._todo, 0.0)
        self.ends: dict[tuple[bool, int, int, int], float] = {}

    def run(self) -> "Events":
        """Do one instruction after the other, until there is none."""
        while any(self._todo.values()):
            assert sum(self._advance(*place) for place in self._todo), "deadlock"
        return self

    def _advance(self, rank: int, stage: int) -> bool:
        if not self._todo[rank, stage]:
            return False
        kind = self._todo[rank, stage][0]
        number = self._done.get((rank, stage, kind), 0)
        if kind in PARTNERS:
            there = stage + TOWARDS[kind]
            if not self._is_next(rank, there, PARTNERS[kind]):
                return False
            link = self._times[3 if SendGrad in (kind, PARTNERS[kind]) else 2]
            end = max(self.clock[rank, stage], self.clock[rank, there]) + link[rank, number, min(stage, there)]
            self._end(rank, stage, kind, end)
            self._end(rank, there, PARTNERS[kind], end)
            return True
        backward = kind is BackwardPass
        meets = (self._synchronization.backward if backward else self._synchronization.forward)[stage]
        degree = int(self._synchronization.degrees[0, number]) if meets else 1
        group = range(rank // degree * degree, rank // degree * degree + degree)
        if not all(self._is_next(other, stage, kind, number) for other in group):
            return False
        begin = max(self.clock[other, stage] for other in group)
        for other in group:
            end = begin + self._times[int(backward)][other, number, stage]
            self.ends[backward, other, number, stage] = end
            self._end(other, stage, kind, end)
        return True

    def _is_next(self, rank: int, stage: int, kind: type[PipeInstruction], number: int | None = None) -> bool:
        todo = self._todo[rank, stage]
        return bool(todo) and todo[0] is kind and number in (None, self._done.get((rank, stage, kind), 0))

    def _end(self, rank: int, stage: int, kind: type[PipeInstruction], end: float) -> None:
        self._todo[rank, stage].popleft()
        self._done[rank, stage, kind] = self._done.get((rank, stage, kind), 0) + 1
        self.clock[rank, stage] = end


@given(cases())
@settings(max_examples=examples(150))
def test_every_pass_of_every_rank_ends_when_it_does_event_by_event(case: tuple[Times, Synchronization]) -> None:
    times, synchronization = case
    events = Events(times, synchronization).run()
    schedule, passes = simulate(*times, synchronization), trace(*times, synchronization)
    for (rank, stage), clock in events.clock.items():
        assert schedule.ends[rank, stage] == pytest.approx(clock)
    for (backward, rank, number, stage), end in events.ends.items():
        side = passes.backward_ends if backward else passes.forward_ends
        assert side[rank, number, stage] == pytest.approx(end)


@given(cases())
@settings(max_examples=examples(40))
def test_waiting_for_others_never_ends_a_step_sooner(case: tuple[Times, Synchronization]) -> None:
    times, synchronization = case
    assert (simulate(*times, synchronization).ends >= simulate(*times).ends - 1e-9).all()


def test_steps_are_independent_of_each_other_however_many_there_are() -> None:
    """More steps than are simulated at a time, and numbers of ranks that do not divide those."""
    random, steps, ranks = np.random.default_rng(0), 900, 6
    packs = np.arange(steps * 3 * ranks).reshape(steps, 3, ranks)
    degrees = np.repeat(random.choice([1, 2, 3, 6], (steps, 3, 1)), ranks, axis=2)
    packs -= np.arange(ranks) % degrees
    forward, backward = random.random((2, packs.size, 2))
    exchanging = np.array([False, True])
    sharing = Sharing(degrees=degrees.ravel(), forward=exchanging, backward=exchanging)

    def ends(of_steps: slice) -> Floats:
        of_ranks = packs[of_steps].transpose(0, 2, 1).reshape(-1, 3)
        return simulate(
            forward[of_ranks], backward[of_ranks], synchronization=sharing.synchronization(packs[of_steps])
        ).ends

    together = ends(slice(None))
    for step in (0, 681, 682, 683, 899):
        alone = slice(step, step + 1)
        assert together[ranks * step : ranks * (step + 1)].tolist() == ends(alone).tolist()
