"""Times of layers on a machine that is disturbed, or faster at one time than at another."""

from collections.abc import Sequence

import numpy as np
import pytest

from trials.costs.layer import NOISE_LIMIT
from trials.tasks.profiling.quiet import QuietTimes, Times, are_quiet, spread


def test_noisy_times_are_taken_again_and_the_quietest_kept() -> None:
    asked: list[tuple[int, ...]] = []

    def measure(numbers: Sequence[int]) -> list[Times]:
        """Probe 1 is noisy in its first two sets of rounds, probe 2 always."""
        asked.append(tuple(numbers))
        turn = len(asked)
        widths = {1: 0.5 if turn <= 8 else 0.01, 2: 2.0 if turn <= 4 else 0.9}
        return [Times(1.0 + widths.get(number, 0.0) * (turn % 4), 1.0, 0.0) for number in numbers]

    noisy = [1, 2]
    found = QuietTimes(measure).measured(range(9), repeats=4)
    assert asked[:4] == [tuple(range(9))] * 4
    # Quiet ones beside them tell how fast the machine is.
    assert [len(numbers) for numbers in asked[4:]] == [7] * 8
    assert all(set(noisy) < set(numbers) for numbers in asked[4:])
    assert spread(found[0]) == 0
    assert spread(found[1]) < 0.02
    assert NOISE_LIMIT < spread(found[2]) < 0.9


def test_quiet_times_are_not_taken_again() -> None:
    asked = []

    def measure(numbers: Sequence[int]) -> list[Times]:
        asked.append(tuple(numbers))
        return [Times(1.0, 2.0, 0.5) for _ in numbers]

    assert QuietTimes(measure).measured(range(2), repeats=3) == [[Times(1.0, 2.0, 0.5)] * 3] * 2
    assert len(asked) == 3


def test_probes_of_several_calls_are_timed_at_one_speed() -> None:
    own = np.array([0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5])
    # The machine is twice as slow from the second call on, and changes by a third from round to round.
    speeds = iter([1.0, 1.3, 0.9, 1.1, *(2 * np.array([1.2, 0.8, 1.0, 1.3]))])

    def measure(numbers: Sequence[int]) -> list[Times]:
        speed = next(speeds)
        return [Times(own[number] * speed, 2 * own[number] * speed, own[number] * speed) for number in numbers]

    times = QuietTimes(measure)
    first, second = times.measured(range(6), repeats=4), times.measured((6, 7), repeats=4)
    medians = [np.median(np.array(each), axis=0) for each in (*first, *second)]
    level = medians[0][0] / own[0]
    assert level == pytest.approx(np.median([1.0, 1.3, 0.9, 1.1]), rel=0.01)
    for mine, found in zip(own, medians, strict=True):
        np.testing.assert_allclose(found[:3], level * mine * np.array([1, 2, 1]))
    assert max(map(spread, (*first, *second))) < 1e-9


def test_further_sizes_are_timed_by_all_ranks_or_by_none() -> None:
    quiet, noisy = [0.01, 0.02, 0.9], [0.01, 0.2, 0.9]
    assert [are_quiet(spreads, 0.05) for spreads in (quiet, noisy)] == [True, False]

    def of_both(median: Sequence[float]) -> list[float]:
        return [max(0.02, 0.2, *median)]

    assert [are_quiet(spreads, 0.05, of_both) for spreads in (quiet, noisy)] == [False, False]
