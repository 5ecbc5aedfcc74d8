"""Times of layers, measured again where they spread too far."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from trials.costs.layer import NOISE_LIMIT

# A choice: a machine that is still disturbed in the third round is marked as noisy instead.
_MORE_ROUNDS = 2
"""Most repetitions of noisy timings."""


class Times(NamedTuple):
    """Seconds of one run of a probe."""

    forward: float
    backward: float
    again: float = 0.0
    """What recomputation adds to both."""
    selective: float = 0.0
    """What selective recomputation adds to both."""
    weights: float = 0.0
    """Weight gradients that are deferred from the backward pass."""
    deferral: float = 0.0
    """What deferring them adds to all passes."""


def measure_until_quiet(
    measure: Callable[[Sequence[int]], Sequence[Times]], count: int, repeats: int
) -> list[list[Times]]:
    """Return `repeats` times of each of `count` probes; repeat those that spread too far, and keep the quietest.

    `measure` times the probes of these numbers once, one after the other.
    """

    def rounds(numbers: Sequence[int]) -> Iterable[list[Times]]:
        return [list(times) for times in zip(*(measure(numbers) for _ in range(repeats)), strict=True)]

    found = list(rounds(range(count)))
    for _ in range(_MORE_ROUNDS):
        noisy = [number for number, times in enumerate(found) if spread(times) > NOISE_LIMIT]
        if not noisy:
            break
        for number, times in zip(noisy, rounds(noisy), strict=True):
            found[number] = min(found[number], times, key=spread)
    return found


def spread(times: Sequence[Times]) -> float:
    """Return the interquartile range of the seconds of both passes as a share of their median; 0 for one repeat."""
    seconds = [each.forward + each.backward for each in times]
    return interquartile_range(seconds) / statistics.median(seconds)


def interquartile_range(values: Sequence[float]) -> float:
    """Return 0 for one value."""
    if len(values) == 1:
        return 0.0
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return upper - lower
