"""How long a step takes: packs pass the stages in DeepSpeed's 1F1B order. A function of times alone."""

from collections import deque
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]


def pipeline_seconds(forward: Array, backward: Array) -> Array:
    """Seconds of each step until the last stage-0 backward pass is done, [steps].

    `forward` and `backward` are seconds of each micro-batch on each stage, [steps, micro-batches, stages]. Stage s runs
    min(stages - 1 - s, micro-batches) forward passes ahead, then one backward for each forward (PipeDream-flush, 1F1B).
    """
    steps, count, stages = forward.shape
    state = _State(steps, stages)
    orders = [_order(stage, stages, count) for stage in range(stages)]
    while any(orders):
        for stage, order in enumerate(orders):
            while order and (ready := state.ready(stage, *order[0])) is not None:
                is_forward, number = order.popleft()
                state.run(stage, is_forward, ready, (forward if is_forward else backward)[:, number, stage])
    result: Array = state.clock.max(axis=0)
    return result


def _order(stage: int, stages: int, count: int) -> deque[tuple[bool, int]]:
    """(is forward, micro-batch) in the order in which the stage runs them."""
    ahead = min(stages - 1 - stage, count)
    order = deque((True, number) for number in range(ahead))
    for number in range(count):
        if ahead + number < count:
            order.append((True, ahead + number))
        order.append((False, number))
    return order


class _State:
    """When each stage has handed on what: `ends[is_forward][stage]` lists the times of the passes done, in order."""

    def __init__(self, steps: int, stages: int) -> None:
        self.clock = np.zeros((stages, steps))
        self._ends: dict[bool, list[list[Array]]] = {
            is_forward: [[] for _ in range(stages)] for is_forward in (True, False)
        }

    def ready(self, stage: int, is_forward: bool, number: int) -> Array | None:
        """When the neighbour hands on what this pass needs; None while that is not known."""
        neighbour = stage - 1 if is_forward else stage + 1
        if not 0 <= neighbour < len(self.clock):
            return np.zeros(self.clock.shape[1])
        done = self._ends[is_forward][neighbour]
        return done[number] if number < len(done) else None

    def run(self, stage: int, is_forward: bool, ready: Array, seconds: Array) -> None:
        self.clock[stage] = np.maximum(self.clock[stage], ready) + seconds
        self._ends[is_forward][stage].append(self.clock[stage].copy())
