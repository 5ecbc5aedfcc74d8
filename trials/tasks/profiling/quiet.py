"""Times of layers at one speed of the machine, measured again where they spread too far."""

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from trials.arrays import Floats
from trials.costs.layer import NOISE_LIMIT
from trials.tasks.profiling.pace import Slowest

# A choice: a machine that is still disturbed in the third round is marked as noisy instead.
_MORE_ROUNDS = 2
"""Most repetitions of noisy timings."""
_REFERENCES = 5
"""Quiet probes that are timed again together with noisy ones, to tell how fast the machine is then; a choice."""
_POLISHES = 4  # the medians hardly change after the second


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


def are_quiet(spreads: Sequence[float], most: float, slowest: Slowest | None = None) -> bool:
    """Return whether the median spread is at most this, with `slowest` that of every rank: all get the same answer."""
    # A rank that timed more than the others would time it alone, while they wait for it.
    median = [statistics.median(spreads)]
    return max(slowest(median) if slowest else median) <= most


class QuietTimes:
    """Times of probes, which are measured in turns, at one speed of the machine.

    The speed of a shared machine changes from round to round. Probes of different rounds would look faster or slower
    than each other, so all times are given at the median speed of the first call of `measured`.
    """

    def __init__(self, measure: Callable[[Sequence[int]], Sequence[Times]]) -> None:
        """`measure` times the probes of these numbers once, one after the other."""
        self._measure = measure
        self._rounds: list[dict[int, Times]] = []
        self._spreads: dict[int, float] = {}
        """Of the probes that were measured before, by their numbers."""
        self._first = 0
        """Number of the rounds of the first call."""

    def measured(self, numbers: Sequence[int], repeats: int) -> list[list[Times]]:
        """Return `repeats` times of each probe; repeat those that spread too far, and keep the quietest."""
        found = self._added(numbers, repeats)
        for _ in range(_MORE_ROUNDS):
            noisy = [number for number in numbers if self._spreads[number] > NOISE_LIMIT]
            if not noisy:
                break
            for number, times in self._added(noisy, repeats).items():
                found[number] = min(found[number], times, key=spread)
                self._spreads[number] = spread(found[number])
        return list(found.values())

    def _added(self, numbers: Sequence[int], repeats: int) -> dict[int, list[Times]]:
        """Return the times of further rounds, by the number of the probe."""
        quietest = sorted(self._spreads, key=lambda number: self._spreads[number])[:_REFERENCES]
        timed = sorted({*numbers, *quietest})
        before = len(self._rounds)
        self._rounds += [dict(zip(timed, self._measure(timed), strict=True)) for _ in range(repeats)]
        self._first = self._first or len(self._rounds)
        slowness = self._slowness()
        rounds = [
            {number: Times(*(seconds / slow for seconds in times[number])) for number in numbers}
            for times, slow in zip(self._rounds[before:], slowness[before:], strict=True)
        ]
        found = {number: [times[number] for times in rounds] for number in numbers}
        self._spreads |= {number: spread(times) for number, times in found.items()}
        return found

    def _slowness(self) -> Floats:
        """Return what each round takes over the median one of the first call, [rounds].

        By median polish (Tukey 1977) of logarithms: a round has a speed, at which each probe has a time of its own.
        """
        logs = np.full((len(self._rounds), 1 + max(map(max, self._rounds))), np.nan)
        for row, of_round in enumerate(self._rounds):
            for number, times in of_round.items():
                logs[row, number] = np.log(times.forward + times.backward)
        speeds = np.zeros(len(logs))
        for _ in range(_POLISHES):
            own = np.nanmedian(logs - speeds[:, None], axis=0)
            speeds = np.nanmedian(logs - own, axis=1)
        return np.exp(speeds - np.median(speeds[: self._first]))


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
