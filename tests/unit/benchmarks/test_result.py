"""Checks of benchmarks: a value that is no number holds no bar."""

import math

import pytest

from benchmarks.full_training import kills
from benchmarks.output.result import at_least, at_most


@pytest.mark.parametrize("values", [[1.0, math.nan], [math.nan, 1.0], [math.inf, 1.0], [1.0, -math.inf], []])
def test_no_bar_is_held_by_what_is_not_finite_or_was_not_measured(values: list[float]) -> None:
    for check in (at_most("peak", values, 2.0), at_least("speed", values, 0.5)):
        assert (check.value, check.holds) == (None, False)


def test_the_value_that_counts_is_the_worst_one() -> None:
    assert (at_most("peak", [1.0, 3.0], 2.0).value, at_least("speed", [1.0, 3.0], 2.0).value) == (3.0, 1.0)
    assert at_most("peak", [1.0, 2.0], 2.0).holds
    assert at_least("speed", [2.0, 3.0], 2.0).holds


def test_losses_that_are_not_a_number_after_a_resume_hold_no_bar() -> None:
    compared = kills.difference({1: 4.0, 2: 3.0, 3: 2.0}, {1: 4.0, 2: math.nan, 3: math.nan})
    assert not at_most("difference", [compared["difference"]], 1e-6).holds
