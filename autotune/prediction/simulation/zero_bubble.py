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


def placed(weights: DeferredWeights, numbers: Ints, pipeline: int) -> tuple[Floats, Floats]:
    """Return the seconds of weight gradients (at the ends of backward passes, after gradients have gone back).

    Both are by the micro-batch of the backward pass, [..., micro-batches, stages]. `numbers` are the positions of the
    stages in a pipeline of `pipeline` stages; several stages may have the same position.
    """
    count = weights.seconds.shape[-2]
    with_pass, after_return = np.zeros_like(weights.seconds), np.zeros_like(weights.seconds)
    for stage, (number, most) in enumerate(zip(numbers.tolist(), weights.most.tolist(), strict=True)):
        follows, steady = _follows(count, pipeline, number, most), _steady(count, pipeline, number, most)
        own = weights.seconds[..., stage]
        last = follows == count - 1
        moved = np.zeros_like(own)
        moved[..., follows[~last]] = own[..., ~last]
        moved[..., -1] = own[..., last].sum(axis=-1)
        with_pass[..., :steady, stage], after_return[..., steady:, stage] = moved[..., :steady], moved[..., steady:]
    return with_pass, after_return


def ends_of(weights: DeferredWeights, passes: Floats, returned: Floats) -> Floats:
    """Return when the weight gradients of each micro-batch end, [..., micro-batches, stages].

    They follow each other to the ends of `passes` with what follows them at once, and of what follows gradients that
    are `returned`, [..., micro-batches, stages - 1].
    """
    count, pipeline = weights.seconds.shape[-2:]
    ends = np.empty_like(weights.seconds)
    for number, most in enumerate(weights.most.tolist()):
        follows, steady = _follows(count, pipeline, number, most), _steady(count, pipeline, number, most)
        end = passes[..., number].copy()
        if steady < count:
            end[..., steady:] = returned[..., steady:, number - 1]
        last = follows == count - 1
        own = np.where(last, weights.seconds[..., number], 0.0)
        later = own[..., ::-1].cumsum(axis=-1)[..., ::-1] - own
        ends[..., number] = end[..., follows] - np.where(last, later, 0.0)
    return ends


def waiting_from(count: int, stages: int, stage: int, most: int) -> Ints:
    """Return the first micro-batch whose weight gradients are deferred as each backward pass begins, [micro-batches].

    Those of the pass before are the last ones.
    """
    return np.searchsorted(_follows(count, stages, stage, most), np.arange(count))


def _steady(count: int, pipeline: int, number: int, most: int) -> int:
    """Return the number of backward passes that weight gradients follow at once, before the gradient is returned."""
    return max(count - (pipeline - number), 0) if most else count


def _follows(count: int, pipeline: int, number: int, most: int) -> Ints:
    """Return the backward pass that the weight gradients of each micro-batch follow, [micro-batches]; they ascend."""
    if not most:
        return np.arange(count)
    steady = _steady(count, pipeline, number, most)
    first = max(steady - most, 0)
    own = np.arange(count)
    return np.where(own < first, own + most, np.minimum(own - first + steady, count - 1))
