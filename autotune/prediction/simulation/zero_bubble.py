"""Weight gradients in the simulated schedule, where `ZeroBubbleSchedule` of the engine computes them.

Let n = m - (P - s) for stage s of P and m micro-batches. After each of its first n backward passes, the stage computes
the weight gradients of the micro-batch s before, if there is one. After each further backward pass but the last it
returns the gradient, and then computes those of the next micro-batch; in the end, all that are left.
"""

import numpy as np

from trials.arrays import Floats, Ints


def placed(weights: Floats) -> tuple[Floats, Floats]:
    """Return the seconds of weight gradients (at the ends of backward passes, after gradients have gone back).

    `weights` are those of each micro-batch, [..., micro-batches, stages]; the results are by the micro-batch of the
    backward pass.
    """
    count, stages = weights.shape[-2:]
    with_pass, after_return = np.zeros_like(weights), np.zeros_like(weights)
    for stage in range(stages):
        # The first stage returns no gradient.
        after = after_return if stage else with_pass
        for number, computed in enumerate(_computed(count, stages, stage)):
            place = with_pass if number < count - (stages - stage) else after
            place[..., number, stage] = weights[..., computed, stage].sum(axis=-1)
    return with_pass, after_return


def ends_of(weights: Floats, passes: Floats, returned: Floats) -> Floats:
    """Return when the weight gradients of each micro-batch end, [..., micro-batches, stages].

    They follow each other to the ends of `passes` with what follows them at once, and of what follows gradients that
    are `returned`, [..., micro-batches, stages - 1].
    """
    count, stages = weights.shape[-2:]
    ends = np.empty_like(weights)
    for stage in range(stages):
        for number, computed in enumerate(_computed(count, stages, stage)):
            is_after = stage and number >= count - (stages - stage)
            end = returned[..., number, stage - 1] if is_after else passes[..., number, stage]
            later = weights[..., computed, stage][..., ::-1].cumsum(axis=-1)[..., ::-1] - weights[..., computed, stage]
            ends[..., computed, stage] = end[..., None] - later
    return ends


def waiting_from(count: int, stages: int, stage: int) -> Ints:
    """Return the first micro-batch whose weight gradients are deferred as each backward pass begins, [micro-batches].

    Those of the pass before are the last ones.
    """
    return np.array([computed.start for computed in _computed(count, stages, stage)])


def _computed(count: int, stages: int, stage: int) -> list[range]:
    """Return the micro-batches whose weight gradients follow each backward pass."""
    steady = max(count - (stages - stage), 0)
    first = max(steady - stage, 0)
    of_steady = [range(max(number - stage, 0), max(number - stage + 1, 0)) for number in range(steady)]
    of_last = [range(first + number, first + number + 1) for number in range(count - steady)]
    return [*of_steady, *of_last[:-1], range(of_last[-1].start, count)]
