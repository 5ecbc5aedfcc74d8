"""Simulation of steps: packs pass the stages in DeepSpeed's 1F1B order.

In slot t of the schedule (`TrainSchedule.steps` in deepspeed/runtime/pipe/schedule.py) every second stage has its turn
for a forward pass, the others for a backward pass. Before it, a stage whose turn is a backward pass meets its
successor, whose turn is a forward pass: first the gradient goes back, then the states of the last forward pass go on.
The engine sends with blocking `torch.distributed.send` (deepspeed/runtime/pipe/p2p.py), which waits for the receiver:
with gloo also for a few kilobytes, and with NCCL because `dynamic_shape` makes the host read the announced
shapes. So an exchange begins when both stages are there, and takes both their time.

Data ranks that share a pack begin its passes together; others do not wait for each other inside a step. Stages may
defer weight gradients (`zero_bubble`), which changes no message.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import numpy as np

from autotune.prediction.simulation.synchronization import Synchronization
from autotune.prediction.simulation.zero_bubble import DeferredWeights, ends_of, placed
from trials.arrays import Floats, Ints

_TOGETHER = 4096
"""Steps of plans that are simulated at a time: enough for long loops in numpy, few enough for the cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PipelineSchedule:
    """Times of the stages in n steps, or in one step of n plans."""

    ends: Floats
    """Time at which each stage ends its last backward pass and exchange, [n, stages]."""
    busy: Floats
    """Seconds in which each stage computes, [n, stages]."""

    @property
    def seconds(self) -> Floats:
        """[n]"""
        seconds: Floats = self.ends.max(axis=1)
        return seconds

    @property
    def idle(self) -> Floats:
        """Seconds in which each stage waits, sends or receives, [n, stages]."""
        return self.seconds[:, None] - self.busy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passes:
    """Time at which each pass ends, [n, micro-batches, stages]."""

    forward_ends: Floats
    backward_ends: Floats
    """Ends of backward passes, without weight gradients that are deferred."""
    weight_ends: Floats | None
    """Ends of deferred weight gradients."""


class _Slot(NamedTuple):
    """Passes and exchanges in one slot of the schedule, each by slices of every second stage and of rows of times.

    Times have a row for each micro-batch and stage, or link, micro-batch by micro-batch.
    """

    meet: slice
    """Stages that exchange states or gradients with their successor."""
    successors: slice
    sending: slice
    """Positions in `meet` of the stages that send states."""
    states: slice
    """Rows of the links of these states."""
    returning: slice
    """Positions in `meet` of the stages that receive a gradient."""
    gradients: slice
    """Rows of the links of these gradients."""
    forward: slice
    """Stages that run a forward pass."""
    forward_passes: slice
    """Rows of these passes."""
    backward: slice
    backward_passes: slice


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shared:
    """Times that plans share."""

    times: Floats
    """[rows of times, n]"""
    rows: Ints
    """Row of each micro-batch and stage, or link, in each plan, [micro-batches x stages, plans]."""

    def __getitem__(self, some: slice) -> Floats:
        return self.times.take(self.rows[some], axis=0)


_Times: TypeAlias = Floats | _Shared
"""Seconds by rows of a slot, [micro-batches x stages or links, plans, n]."""


def simulate(
    forward: Floats,
    backward: Floats,
    sends: Floats | None = None,
    returns: Floats | None = None,
    synchronization: Synchronization | None = None,
    *,
    weights: DeferredWeights | None = None,
) -> PipelineSchedule:
    """Simulate steps of 1F1B; with one stage, of plain gradient accumulation.

    `forward` and `backward` are seconds of each micro-batch on each stage, [n, micro-batches, stages]. `sends` are
    seconds of a micro-batch's states from stage s to s + 1, [n, micro-batches, stages - 1]; None when that takes no
    time. `returns` are those of their gradient on the way back; None when they are the same. With `synchronization`, n
    counts the data ranks of each step. `weights` are the weight gradients in `backward` that are deferred, with
    seconds of the same shape; None where none are. The work grows linearly with each of the three lengths.
    """
    count, stages = forward.shape[1:]
    ends = np.empty((stages, 1, len(forward)))
    ranks = synchronization.ranks if synchronization else 1
    steps = max(_TOGETHER // ranks, 1)
    awaited, after = _deferred(backward, weights, np.arange(stages), stages)
    for first in range(0, len(forward), steps * ranks):
        some = slice(first, first + steps * ranks)
        passes = _rows(forward[some]), _rows(awaited[some])
        clock = np.zeros_like(ends[..., some])
        met = synchronization and synchronization.of_steps(slice(first // ranks, first // ranks + steps))
        links, later = _links(sends, returns, some), None if after is None else _rows(after[some, :, 1:])
        for _ in _run(count, clock, *passes, links, synchronization=met, after=later):
            pass
        ends[..., some] = clock
    return PipelineSchedule(ends=ends[:, 0].T, busy=forward.sum(axis=1) + backward.sum(axis=1))


def simulate_plans(
    plans: Ints,
    forward: Floats,
    backward: Floats,
    sends: Floats,
    returns: Floats,
    *,
    weights: DeferredWeights | None = None,
) -> Floats:
    """Return what `PipelineSchedule.ends` is of n steps of many plans, [stages, plans, n].

    `plans` are the stages of each plan, [plans, stages], as numbers of different stages, of which the times are given:
    [different stages, micro-batches, n]. Those of links are by the stage before the link. `weights` are as in
    `simulate`, with seconds [n, micro-batches, different stages], each of which has the same place in all plans.
    """
    count, steps = forward.shape[1:]
    numbers = np.zeros(len(forward), dtype=np.int64)
    numbers[plans] = np.arange(plans.shape[1])
    awaited, after = _deferred(backward.T, weights, numbers, plans.shape[1])
    backward = awaited.T
    ends = np.zeros((plans.shape[1], len(plans), steps))
    batches = np.arange(count)[:, None, None]
    together = max(_TOGETHER // steps, 1)
    for first in range(0, len(plans), together):
        some = slice(first, first + together)
        of_stages = plans[some].T * count
        of_passes = (of_stages + batches).reshape(-1, of_stages.shape[1])
        of_links, of_returns = (
            (each + batches).reshape(-1, of_stages.shape[1]) for each in (of_stages[:-1], of_stages[1:])
        )
        forwards, backwards = (_Shared(times=side.reshape(-1, steps), rows=of_passes) for side in (forward, backward))
        states, gradients = (_Shared(times=side.reshape(-1, steps), rows=of_links) for side in (sends, returns))
        later = None if after is None else _Shared(times=after.T.reshape(-1, steps), rows=of_returns)
        for _ in _run(count, ends[:, some], forwards, backwards, (states, gradients), after=later):
            pass
    return ends


def trace(
    forward: Floats,
    backward: Floats,
    sends: Floats | None = None,
    returns: Floats | None = None,
    synchronization: Synchronization | None = None,
    *,
    weights: DeferredWeights | None = None,
) -> Passes:
    """Return when the passes of steps end, for the arguments of `simulate`."""
    count, stages = forward.shape[1:]
    clock = np.zeros((stages, 1, len(forward)))
    forward_ends, backward_ends = np.empty((2, count * stages, *clock.shape[1:]))
    returned = np.empty((count * (stages - 1), *clock.shape[1:]))
    awaited, after = _deferred(backward, weights, np.arange(stages), stages)
    passes, links = (_rows(forward), _rows(awaited)), _links(sends, returns, slice(None))
    later = None if after is None else _rows(after[..., 1:])
    for slot in _run(count, clock, *passes, links, synchronization=synchronization, after=later):
        forward_ends[slot.forward_passes] = clock[slot.forward]
        backward_ends[slot.backward_passes] = clock[slot.backward]
        returned[slot.gradients] = clock[slot.successors][slot.returning]
    sides = (
        ends.reshape(count, -1, len(forward)).transpose(2, 0, 1) for ends in (forward_ends, backward_ends, returned)
    )
    ended, run_back, sent_back = sides
    if weights is None:
        return Passes(forward_ends=ended, backward_ends=run_back, weight_ends=None)
    return Passes(
        forward_ends=ended,
        backward_ends=run_back - (awaited - backward + weights.seconds),
        weight_ends=ends_of(weights, run_back, sent_back),
    )


def _deferred(
    backward: Floats, weights: DeferredWeights | None, numbers: Ints, pipeline: int
) -> tuple[Floats, Floats | None]:
    """Return the seconds of (backward passes with what follows at once, what follows gradients that are returned).

    Shapes are [n, micro-batches, stages]. `numbers` are the positions of the stages in a pipeline of `pipeline` stages.
    """
    if weights is None:
        return backward, None
    with_pass, after = placed(weights, numbers, pipeline)
    return backward - weights.seconds + with_pass, after


def _rows(times: Floats) -> Floats:
    """Return times [n, micro-batches, stages or links] by rows of a slot."""
    return times.transpose(1, 2, 0).reshape(-1, 1, len(times))


def _links(sends: Floats | None, returns: Floats | None, some: slice) -> tuple[Floats, Floats] | None:
    if sends is None:
        return None
    states = _rows(sends[some])
    return states, states if returns is None else _rows(returns[some])


def _run(
    count: int,
    clock: Floats,
    forward: _Times,
    backward: _Times,
    links: tuple[_Times, _Times] | None,
    *,
    synchronization: Synchronization | None = None,
    after: _Times | None = None,
) -> Iterator[_Slot]:
    """Advance the clocks of the stages, [stages, plans, n], slot by slot; `links` are (sends, returns).

    `after` are what stages compute once they have returned a gradient, by its link. With `synchronization` there is one
    plan.
    """
    for slot in _slots(count, len(clock)):
        both = np.maximum(clock[slot.meet], clock[slot.successors])
        if links is not None:
            states, gradients = links[0][slot.states], links[1][slot.gradients]
            if len(states) == len(gradients):
                both += gradients + states
            else:  # the pipeline fills or drains
                exchange = np.zeros_like(both)
                exchange[slot.returning] = gradients
                exchange[slot.sending] += states
                both += exchange
        clock[slot.meet] = clock[slot.successors] = both
        if after is not None:
            clock[slot.successors][slot.returning] += after[slot.gradients]
        if synchronization is not None:
            _synchronize(clock, slot, synchronization)
        clock[slot.forward] += forward[slot.forward_passes]
        clock[slot.backward] += backward[slot.backward_passes]
        yield slot


def _synchronize(clock: Floats, slot: _Slot, synchronization: Synchronization) -> None:
    """Let the ranks of the stages wait for those with which they begin the passes of a slot."""
    stages, count = len(clock), synchronization.degrees.shape[1]
    sides = ((slot.forward, slot.forward_passes, False), (slot.backward, slot.backward_passes, True))
    for running, passes, backward in sides:
        for stage, row in zip(range(stages)[running], range(count * stages)[passes], strict=True):
            synchronization.await_others(clock[stage, 0], stage, row // stages, backward=backward)


@lru_cache(maxsize=32)
def _slots(count: int, stages: int) -> tuple[_Slot, ...]:
    """Return the schedule of `count` micro-batches on `stages` stages."""
    # Until the last micro-batch enters, it is that of any more of them, which packings of all sizes share.
    entered = 2 * (count - 1)
    entering = _entering(1 << (count - 1).bit_length(), stages)[:entered]
    return (*entering, *_built(count, stages, entered, 2 * (count + stages - 1)))


@lru_cache(maxsize=32)
def _entering(count: int, stages: int) -> tuple[_Slot, ...]:
    return _built(count, stages, 0, 2 * (count - 1))


def _built(count: int, stages: int, first_time: int, end: int) -> tuple[_Slot, ...]:
    """Return the slots of the schedule from the first to the one before the end."""
    time = np.arange(first_time, end)
    # Stage s has its forward pass (time - s) / 2 where that is whole, else its backward pass
    # (time + s + 1) / 2 - stages. The successor's forward pass takes the states that s made in the slot before.
    forward, forwards = _every_second(time - 2 * (count - 1), time, stages)
    backward, backwards = _every_second(2 * stages - 1 - time, 2 * (stages + count) - 3 - time, stages)
    states, sent = _every_second(time + 1 - 2 * count, time - 1, stages - 1)
    gradients, returned = _every_second(2 * stages - 1 - time, 2 * (stages + count) - 3 - time, stages - 1)
    # Where there are both, both reach the last link.
    first, meet = np.where(sent > returned, states, gradients), np.maximum(sent, returned)
    links = stages - 1
    columns = (
        _slices(first, meet, 2),
        _slices(first + 1, meet, 2),
        _slices((states - first) // 2, sent, 1),
        _slices((time - 1 - states) // 2 * links + states, sent, 2 - links),
        _slices((gradients - first) // 2, returned, 1),
        _slices(((time + 1 + gradients) // 2 - stages) * links + gradients, returned, 2 + links),
        _slices(forward, forwards, 2),
        _slices((time - forward) // 2 * stages + forward, forwards, 2 - stages),
        _slices(backward, backwards, 2),
        _slices(((time + 1 + backward) // 2 - stages) * stages + backward, backwards, 2 + stages),
    )
    return tuple(_Slot(*slices) for slices in zip(*columns, strict=True))


def _every_second(least: Ints, most: Ints, below: int) -> tuple[Ints, Ints]:
    """Return (first, how many) of every second number from `least` to `most` that is one of those from 0 to `below`."""
    first = np.where(least >= 0, least, least % 2)
    return first, np.maximum((np.minimum(most, below - 1) - first + 2) // 2, 0)


def _slices(first: Ints, count: Ints, step: int) -> list[slice]:
    """Return slices of `count` entries each; none has more than one where `step` is 0."""
    step = step or 1
    starts = np.where(count > 0, first, 0)
    ends = zip(starts.tolist(), (starts + count * step).tolist(), strict=True)
    # A slice that runs down to row 0 has no end: -1 would mean the last row.
    return [slice(start, stop if stop >= 0 else None, step) for start, stop in ends]
