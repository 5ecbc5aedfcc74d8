"""Quantities: texts with units such as `400MiB` and `10min`, counts with their nouns, and measured numbers."""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction

_BYTES = {
    "B": 1,
    **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)},
    **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)},
}
_SECONDS = {"s": 1, "min": 60, "h": 3600}
_SHORT = 10.0
"""Seconds below which a time is shown with a fraction."""
_QUANTITY = re.compile(r"\s*(\d{1,15}(?:\.\d{1,30})?)\s*([A-Za-z]*)\s*", re.ASCII)


def parse_bytes(value: object) -> int:
    """Return the bytes of a text such as `400MiB` or `1.5 GB`; case does not matter. Of numbers, 0 needs no unit.

    Raise ValueError with the value and the known units.
    """
    return round(_parse(value, _BYTES, "a size such as 400MiB or 1.5GB"))


def parse_seconds(value: object) -> float:
    """Return the seconds of a text such as `90s` or `1.5h`, or of 0. Raise ValueError like `parse_bytes`."""
    return float(_parse(value, _SECONDS, "a time such as 90s, 10min or 1.5h"))


def probability_text(probability: float) -> str:
    """Return a probability in whole per cent; one that rounds to certainty, which no measurement gives, as a bound."""
    return f"{probability:.0%}" if probability < 0.995 else "more than 99%"


def time_setting(seconds: float) -> str:
    """Return a time as a job file has it, in the largest unit of which it is a multiple: `10min`."""
    # Through the shortest decimals that give the number back: a job has the same value again.
    return _setting(seconds, _SECONDS) if seconds % 1 == 0 else f"{Decimal(repr(seconds)):f}s"


def size_setting(size: int) -> str:
    """Return a size as a job file has it, in the largest unit of which it is a multiple: `400MiB`."""
    return _setting(size, _BYTES)


def time_text(seconds: float) -> str:
    """Return a time for people, with a fraction where it is short: `0.53 s`, `4.2 s` or `1 min 12 s`."""
    return f"{seconds:.2g} s" if seconds < _SHORT else duration_text(seconds)


def duration_text(seconds: float) -> str:
    """Return a duration for people: `4 s`, `1 min 12 s` or `2 h 05 min`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def speed_text(samples_per_second: float, error: float | None = None) -> str:
    """Return a speed, with its error if given: with one decimal, below 1 with two digits."""
    decimals = speed_decimals(samples_per_second)
    of_error = "" if error is None else f" +- {error:.{decimals}f}"
    return f"{samples_per_second:.{decimals}f}{of_error}"


def speed_decimals(samples_per_second: float) -> int:
    """Return how many decimals a speed and its error are shown with."""
    return max(1, 1 - math.floor(math.log10(samples_per_second))) if samples_per_second > 0 else 1


def number_of(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: `1 step` or `2 steps`; `plural` where it is more than an s."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def _setting(quantity: float, units: Mapping[str, int]) -> str:
    unit, scale = max((each for each in units.items() if quantity % each[1] == 0), key=lambda each: each[1])
    return f"{int(quantity) // scale}{unit}"


def _parse(value: object, units: Mapping[str, int], example: str) -> Fraction:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    number = value if is_number else match and float(match[1])
    if number == 0 and (is_number or (match and not match[2])):
        return Fraction(0)
    known = ", ".join(units)
    # A number alone may be meant in any unit: 80 of an 80GiB device would be 80 bytes.
    if is_number or (match and not match[2]):
        raise ValueError(f"{value!r} has no unit; write {example}; units are {known}")
    scale = {name.lower(): factor for name, factor in units.items()}.get(match[2].lower()) if match else None
    if match is None or scale is None:
        raise ValueError(f"{value!r} is not {example}; units are {known}")
    return Fraction(match[1]) * scale


def check_measured(measured: object) -> None:
    """Raise ValueError, with the field, for a number in the dataclass that is negative or not finite."""
    for field in fields(measured):  # type: ignore[arg-type]
        value = getattr(measured, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not 0 <= number <= sys.float_info.max:
                raise ValueError(f"{field.name} is {number}, which cannot be a measured value")
