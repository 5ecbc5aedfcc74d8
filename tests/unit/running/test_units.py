import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.units import (
    duration_text,
    number_of,
    parse_bytes,
    parse_seconds,
    size_setting,
    speed_text,
    time_setting,
    time_text,
)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("400MiB", 400 * 1024**2),
        ("1.5 GB", 1_500_000_000),
        (" 2 gib ", 2 * 1024**3),
        ("7B", 7),
        (0, 0),
        ("0", 0),
    ],
)
def test_sizes_are_bytes(written: object, expected: int) -> None:
    assert parse_bytes(written) == expected


@pytest.mark.parametrize(("written", "expected"), [("90s", 90), ("10min", 600), ("1.5h", 5400), ("2.5s", 2.5), (0, 0)])
def test_times_are_seconds(written: object, expected: float) -> None:
    assert parse_seconds(written) == expected


@pytest.mark.parametrize(
    ("seconds", "written"), [(7200, "2h"), (600, "10min"), (90, "90s"), (0.5, "0.5s"), (5400, "90min")]
)
def test_a_time_of_a_job_is_written_with_its_unit(seconds: float, written: str) -> None:
    assert time_setting(seconds) == written
    assert parse_seconds(written) == seconds


@given(st.floats(1e-6, 1e12) | st.integers(1, 10**12).map(float), st.integers(1, 10**14))
def test_a_written_time_or_size_is_read_as_it_was(seconds: float, size: int) -> None:
    assert parse_seconds(time_setting(seconds)) == seconds
    assert parse_bytes(size_setting(size)) == size


def test_a_size_of_a_job_is_written_with_its_unit() -> None:
    assert [size_setting(size) for size in (400 << 20, 80 << 30, 1_500_000_000, 7)] == [
        "400MiB",
        "80GiB",
        "1500MB",
        "7B",
    ]


@pytest.mark.parametrize("written", [80, 80.0, -5, "80", " 80 ", "1.5", 10**400, math.inf, math.nan], ids=repr)
def test_a_size_or_time_without_a_unit_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match=r"has no unit; write a size such as 400MiB or 1.5GB; units are B, KB"):
        parse_bytes(written)
    with pytest.raises(ValueError, match=r"has no unit; write a time such as 90s, 10min or 1.5h; units are s, min, h"):
        parse_seconds(written)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.9, "59 s"),
        (60, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (7500, "2 h 05 min"),
        (3e5, "83 h 20 min"),
    ],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.004, "0.004 s"), (0.53, "0.53 s"), (4.24, "4.2 s"), (59.9, "59 s"), (60, "1 min 00 s")]
)
def test_short_times_have_a_fraction(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@pytest.mark.parametrize(
    "written",
    [
        "400",
        "MiB",
        "4 parsecs",
        "-1GiB",
        "1e3MB",
        "",
        None,
        True,
        [1],
        math.inf,
        -math.inf,
        math.nan,
        10**400,
        "9" * 400 + "GiB",
    ],
    ids=repr,
)
def test_what_is_no_size_is_refused_with_the_units(written: object) -> None:
    with pytest.raises(ValueError, match="units are B, KB"):
        parse_bytes(written)


@pytest.mark.parametrize("written", ["10", "10 minutes", "10MiB", math.nan, False])
def test_what_is_no_time_is_refused_with_the_units(written: object) -> None:
    with pytest.raises(ValueError, match="units are s, min, h"):
        parse_seconds(written)


@given(st.integers(0, 10**9), st.sampled_from(["B", "KiB", "MiB", "GiB", "kb", "mB"]))
def test_a_size_grows_with_its_number(number: int, unit: str) -> None:
    assert parse_bytes(f"{number}{unit}") < parse_bytes(f"{number + 1}{unit}")


@pytest.mark.parametrize(
    ("speed", "error", "expected"),
    [
        (1234.56, 1.25, "1234.6 +- 1.2"),
        (10.0, 0.02, "10.0 +- 0.0"),
        (8.0, 0.25, "8.0 +- 0.2"),
        (0.5, None, "0.50"),
        (0.043, 0.0012, "0.043 +- 0.001"),
        (0.0, 0.0, "0.0 +- 0.0"),
    ],
)
def test_slow_speeds_have_two_digits(speed: float, error: float | None, expected: str) -> None:
    assert speed_text(speed, error) == expected


def test_a_count_of_one_has_its_noun_in_the_singular() -> None:
    assert [number_of(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert [number_of(count, "study", "studies") for count in (1, 2)] == ["1 study", "2 studies"]
