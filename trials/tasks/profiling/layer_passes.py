"""Passes of layers of each tower, during which ranks exchange."""

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch

from trials.tasks.profiling.one_of_each import OneOfEach
from trials.tasks.profiling.pace import Pace, begun_together
from trials.tasks.profiling.probes import Probe, probes
from trials.tasks.request import ProbeSizes

# A choice: on two CPU cores, single turns differ by half of the share, and medians of 20 by a tenth.
_TURNS = 12


def middle_probes(stage: OneOfEach, sizes: ProbeSizes, device: torch.device) -> Iterator[Probe]:
    """Yield a probe of each tower, of the usual kind of layer, with a pack of middle size."""
    middle = ProbeSizes(
        unit_counts=(sorted(sizes.unit_counts)[len(sizes.unit_counts) // 2],),
        sample_shapes=(sorted(sizes.sample_shapes, key=math.prod)[len(sizes.sample_shapes) // 2],),
        image_units=sizes.image_units,
    )
    usual = {"vision": stage.cut.vision[:1], "language": stage.cut.language[:1]}
    for probe in probes(stage, middle, device):
        if probe.number in usual.get(probe.layer, ()):
            yield probe


def run_layers(
    probe: Probe,
    count: int,
    before_forward: Callable[[], None] | None = None,
    before_backward: Callable[[], None] | None = None,
) -> None:
    """Run the forward and backward passes of `count` such layers in a row; before that of each, call what is given."""
    states = probe.states.detach().clone().requires_grad_()
    for _ in range(count):
        if before_forward:
            before_forward()
        states = probe.run(states)
        if before_backward:
            states.register_hook(lambda _: before_backward())
    states.backward(torch.ones_like(states))


def saved_share(
    exchange: Callable[[], object],
    passes: Callable[[], object],
    both: Callable[[], object],
    device: torch.device,
    pace: Pace,
) -> float:
    """Return the share of the shorter of both that an exchange and passes save by running at once, of -1 to 1.

    It is negative where both together take longer than one after the other. Every rank must call it.
    """
    turn = partial(share_of_turn, *(begun_together(run, device) for run in (exchange, passes, both)))
    return max(-1.0, min(1.0, statistics.median(pace.repeat(turn, _TURNS))))


def share_of_turn(exchange: Callable[[], float], passes: Callable[[], float], both: Callable[[], float]) -> float:
    """Return the share that one turn saves. Each function runs one of them, or both, and returns its seconds.

    One follows the other, so that a drift of the machine affects all alike.
    """
    shorter, longer = sorted((exchange(), passes()))
    return (shorter + longer - both()) / shorter
