"""Simulation of steps: packs pass the stages in DeepSpeed's 1F1B order.

In slot t of the schedule (`TrainSchedule.steps` in deepspeed/runtime/pipe/schedule.py) every second stage has its turn
for a forward pass, the others for a backward pass. Before it, a stage whose turn is a backward pass meets its
successor, whose turn is a forward pass: first the gradient goes back, then the states of the last forward pass go on.
The engine sends with blocking `torch.distributed.send` (deepspeed/runtime/pipe/p2p.py), which waits for the receiver:
with gloo also for a few kilobytes, and with NCCL because `dynamic_shape` makes the host read the announced
shapes. So an exchange begins when both stages are there, and takes both their time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autotune.prediction.costs import Array
from trials.data.records.sample import Ints

_TOGETHER = 512
"""Steps or plans that are simulated at a time: enough for long loops in numpy, few enough for the cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """Times of the stages in n steps, or in one step of n plans."""

    ends: Array
    """Time at which each stage ends its last backward pass and exchange, [n, stages]."""
    busy: Array
    """Seconds in which each stage computes, [n, stages]."""

    @property
    def seconds(self) -> Array:
        """[n]"""
        seconds: Array = self.ends.max(axis=1)
        return seconds

    @property
    def idle(self) -> Array:
        """Seconds in which each stage waits, sends or receives, [n, stages]."""
        return self.seconds[:, None] - self.busy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Passes:
    """Time at which each pass ends, [n, micro-batches, stages]."""

    forward_ends: Array
    backward_ends: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Slot:
    """Passes and exchanges in one slot of the schedule."""

    meet: Ints
    """Stages that exchange states or gradients with their successor."""
    gradients: Ints
    """Micro-batch whose gradient each of `meet` receives; -1 for none."""
    states: Ints
    """Micro-batch whose states each of `meet` sends; -1 for none."""
    run: Ints
    """Stages that run a pass."""
    passes: Ints
    """Micro-batch of each of `run`, plus the number of micro-batches for a backward pass."""


def simulate(forward: Array, backward: Array, sends: Array | None = None, returns: Array | None = None) -> Schedule:
    """Simulate steps of 1F1B; with one stage, of plain gradient accumulation.

    `forward` and `backward` are seconds of each micro-batch on each stage, [n, micro-batches, stages]. `sends` are
    seconds of a micro-batch's states from stage s to s + 1, [n, micro-batches, stages - 1]; None when that takes no
    time. `returns` are those of their gradient on the way back; None when they are the same. The work grows linearly
    with each of the three lengths.
    """
    ends = np.empty((len(forward), forward.shape[2]))
    for first in range(0, len(forward), _TOGETHER):
        some = slice(first, first + _TOGETHER)
        # Stages first, so that the operations on some stages use contiguous rows.
        clock = np.zeros_like(ends[some].T, order="C")
        links = [None if side is None else side[some] for side in (sends, returns)]
        for _ in _run(clock, forward[some], backward[some], *links):
            pass
        ends[some] = clock.T
    return Schedule(ends=ends, busy=forward.sum(axis=1) + backward.sum(axis=1))


def trace(forward: Array, backward: Array, sends: Array | None = None, returns: Array | None = None) -> Passes:
    """Return when the passes of the same steps end."""
    clock = np.zeros((forward.shape[2], len(forward)))
    ends = np.empty((2 * forward.shape[1], *clock.shape))
    for slot in _run(clock, forward, backward, sends, returns):
        ends[slot.passes, slot.run] = clock[slot.run]
    forward_ends, backward_ends = np.split(ends.transpose(2, 0, 1), 2, axis=1)
    return Passes(forward_ends=forward_ends, backward_ends=backward_ends)


def _run(clock: Array, forward: Array, backward: Array, sends: Array | None, returns: Array | None) -> Iterator[_Slot]:
    """Advance the clocks of the stages, [stages, n], slot by slot."""
    seconds = np.concatenate((forward.transpose(1, 2, 0), backward.transpose(1, 2, 0)))
    if sends is not None:
        # Behind the last micro-batch, where index -1 leads: nothing to send takes no time.
        nothing = np.zeros((1, clock.shape[0] - 1, clock.shape[1]))
        states, gradients = (
            np.concatenate((side.transpose(1, 2, 0), nothing))
            for side in (sends, sends if returns is None else returns)
        )
    for slot in _slots(forward.shape[1], len(clock)):
        both = np.maximum(clock[slot.meet], clock[slot.meet + 1])
        if sends is not None:
            both += gradients[slot.gradients, slot.meet] + states[slot.states, slot.meet]
        clock[slot.meet] = clock[slot.meet + 1] = both
        clock[slot.run] += seconds[slot.passes, slot.run]
        yield slot


@lru_cache(maxsize=256)
def _slots(count: int, stages: int) -> tuple[_Slot, ...]:
    """Return the schedule of `count` micro-batches on `stages` stages."""
    number = np.arange(stages)
    slots = []
    for time in range(2 * (count + stages - 1)):
        is_forward = (time + number) % 2 == 0
        micro_batch = np.where(is_forward, (time - number) // 2, (time + number + 1) // 2 - stages)
        valid = (micro_batch >= 0) & (micro_batch < count)
        # The successor's forward pass takes the states that this stage made in the slot before.
        gradients, states = np.where(valid, micro_batch, -1)[:-1], np.where(valid, micro_batch, -1)[1:]
        meet = np.flatnonzero(~is_forward[:-1] & ((gradients >= 0) | (states >= 0)))
        run = np.flatnonzero(valid)
        passes = (micro_batch + np.where(is_forward, 0, count))[run]
        slots.append(_Slot(meet=meet, gradients=gradients[meet], states=states[meet], run=run, passes=passes))
    return tuple(slots)
