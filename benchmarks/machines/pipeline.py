"""Event simulation of one pipeline: each stage runs its own program, and messages join the clocks of two stages."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache

import numpy as np

from trials.arrays import Floats


class Act(Enum):
    """What a stage does next with a micro-batch."""

    FORWARD = auto()
    BACKWARD = auto()
    SEND_STATES = auto()
    RECEIVE_STATES = auto()
    SEND_GRADIENTS = auto()
    RECEIVE_GRADIENTS = auto()


_ANSWERS = {Act.SEND_STATES: (1, Act.RECEIVE_STATES), Act.SEND_GRADIENTS: (-1, Act.RECEIVE_GRADIENTS)}
"""Distance to the stage that receives, and what it does meanwhile."""
_RECEIVING = frozenset(act for _, act in _ANSWERS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One pass, or one message from `stage`."""

    act: Act
    stage: int
    micro_batch: int


def program(stage: int, stages: int, count: int) -> Iterator[tuple[Act, int]]:
    """Yield the acts of a stage in one step of 1F1B with `count` micro-batches (Narayanan et al. 2019, section 3.2).

    Between two of its passes, a stage takes a gradient and hands on states, or the reverse, with one neighbour.
    """
    depth = stages - stage
    for number in range(count + depth):
        done, due = number - depth, number - depth + 1
        if stage > 0:
            if done >= 0:
                yield Act.SEND_GRADIENTS, done
            if number < count:
                yield Act.RECEIVE_STATES, number
        if number < count:
            yield Act.FORWARD, number
        if depth > 1:
            if 0 <= due < count:
                yield Act.RECEIVE_GRADIENTS, due
            if number < count:
                yield Act.SEND_STATES, number
        if 0 <= due < count:
            yield Act.BACKWARD, due


@lru_cache(maxsize=512)
def events(stages: int, count: int) -> tuple[Event, ...]:
    """Return the events of all stages in an order in which they can happen. Raise RuntimeError for a deadlock."""
    left = [list(program(stage, stages, count))[::-1] for stage in range(stages)]
    found: list[Event] = []
    while any(left):
        before = len(found)
        for stage in range(stages):
            while left[stage] and _can_begin(left, stage):
                act, micro_batch = left[stage].pop()
                if act in _ANSWERS:
                    left[stage + _ANSWERS[act][0]].pop()
                found.append(Event(act=act, stage=stage, micro_batch=micro_batch))
        if len(found) == before:
            raise RuntimeError(f"{stages} stages with {count} micro-batches wait for each other")
    return tuple(found)


def _can_begin(left: list[list[tuple[Act, int]]], stage: int) -> bool:
    """Return whether a stage may do its next act; a message begins when its sender is there, with the receiver."""
    act, micro_batch = left[stage][-1]
    if act not in _ANSWERS:
        return act not in _RECEIVING
    by, answer = _ANSWERS[act]
    other = left[stage + by]
    return bool(other) and other[-1] == (answer, micro_batch)


def stage_ends(forward: Floats, backward: Floats, messages: Floats, overlap: float = 0.0) -> Floats:
    """Return when each stage ends its last act, [rows, stages].

    `forward` and `backward` are seconds of passes, [rows, micro-batches, stages]; `messages` are those of the states
    from each stage to the next, and of their gradients, [rows, micro-batches, stages - 1]. A message takes both stages
    from when both are there. Of a share `overlap` of it, the sender is free at once.
    """
    rows, count, stages = forward.shape
    clock = np.zeros((stages, rows))
    seconds = {
        Act.FORWARD: forward.transpose(1, 2, 0).copy(),
        Act.BACKWARD: backward.transpose(1, 2, 0).copy(),
    }
    links = messages.transpose(1, 2, 0).copy()
    for event in events(stages, count):
        stage, number = event.stage, event.micro_batch
        if event.act in seconds:
            clock[stage] += seconds[event.act][number, stage]
            continue
        to = stage + _ANSWERS[event.act][0]
        took, ready, there = links[number, min(stage, to)], clock[stage], clock[to]
        together = np.maximum(ready, there) + took
        clock[to] = (1 - overlap) * together + overlap * np.maximum(ready + took, there)
        clock[stage] = (1 - overlap) * together + overlap * ready
    return clock.T
