"""Weight gradients in the simulated schedule, where `ZeroBubbleSchedule` of the engine computes them.

Let n = m - (P - s) for stage s of P and m micro-batches, and d the most that wait, at least 1. After each of its first
n backward passes, the stage computes the weight gradients of the micro-batch d before, if there is one. After each
further backward pass but the last it returns the gradient, and then computes those of the next micro-batch; in the end,
all that are left. With d = 0 it computes those of each micro-batch in its backward pass.
"""

from typing import NamedTuple

import numpy as np

from trials.arrays import Floats, Ints


class DeferredWeights(NamedTuple):
    """Weight gradients that stages defer."""

    seconds: Floats
    """Of each micro-batch, [..., micro-batches, stages]."""
    most: Ints
    """Most micro-batches whose weight gradients wait, [stages]."""


def placed(weights: DeferredWeights) -> tuple[Floats, Floats]:
    """Return the seconds of weight gradients (at the ends of backward passes, after gradients have gone back).

    Both are by the micro-batch of the backward pass, [..., micro-batches, stages].
    """
    count, stages = weights.seconds.shape[-2:]
    with_pass, after_return = np.zeros_like(weights.seconds), np.zeros_like(weights.seconds)
    for stage, most in enumerate(weights.most.tolist()):
        after = after_return if most else with_pass
        for number, computed in enumerate(_computed(count, stages, stage, most)):
            place = with_pass if number < count - (stages - stage) else after
            place[..., number, stage] = weights.seconds[..., computed, stage].sum(axis=-1)
    return with_pass, after_return


def ends_of(weights: DeferredWeights, passes: Floats, returned: Floats) -> Floats:
    """Return when the weight gradients of each micro-batch end, [..., micro-batches, stages].

    They follow each other to the ends of `passes` with what follows them at once, and of what follows gradients that
    are `returned`, [..., micro-batches, stages - 1].
    """
    count, stages = weights.seconds.shape[-2:]
    ends = np.empty_like(weights.seconds)
    for stage, most in enumerate(weights.most.tolist()):
        for number, computed in enumerate(_computed(count, stages, stage, most)):
            is_after = most and number >= count - (stages - stage)
            end = returned[..., number, stage - 1] if is_after else passes[..., number, stage]
            own = weights.seconds[..., computed, stage]
            later = own[..., ::-1].cumsum(axis=-1)[..., ::-1] - own
            ends[..., computed, stage] = end[..., None] - later
    return ends


def waiting_from(count: int, stages: int, stage: int, most: int) -> Ints:
    """Return the first micro-batch whose weight gradients are deferred as each backward pass begins, [micro-batches].

    Those of the pass before are the last ones.
    """
    return np.array([computed.start for computed in _computed(count, stages, stage, most)])


def _computed(count: int, stages: int, stage: int, most: int) -> list[range]:
    """Return the micro-batches whose weight gradients follow each backward pass."""
    if not most:
        return [range(number, number + 1) for number in range(count)]
    steady = max(count - (stages - stage), 0)
    first = max(steady - most, 0)
    of_steady = [range(max(number - most, 0), max(number - most + 1, 0)) for number in range(steady)]
    of_last = [range(first + number, first + number + 1) for number in range(count - steady)]
    return [*of_steady, *of_last[:-1], range(of_last[-1].start, count)]
