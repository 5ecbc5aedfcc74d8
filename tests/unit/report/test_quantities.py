"""Quantities as text for people."""

import pytest

from autotune.report.charts.quantities import seconds_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 ms"),
        (-2.8e-17, "0 ms"),
        (3e-9, "3e-06 ms"),
        (0.0123, "12.3 ms"),
        (-0.5, "-500 ms"),
        (1.5, "1.5 s"),
        (3600.0, "60 min"),
        (72_000.0, "20 h"),
    ],
)
def test_a_duration_has_a_unit_that_suits_it_and_what_rounding_leaves_is_0(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
