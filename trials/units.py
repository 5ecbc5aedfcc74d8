"""Quantities: texts with units such as `400MiB` and `10min`, counts with their nouns, and measured numbers."""

import math
import re
from dataclasses import fields

_BYTES = {
    "B": 1,
    **{f"{p}B": 1000**n for n, p in enumerate("KMGT", 1)},
    **{f"{p}iB": 1024**n for n, p in enumerate("KMGT", 1)},
}
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]+)\s*", re.ASCII)
_MOST = 1 << 63  # above it, infinities included, no quantity makes sense


def parse_bytes(value: object) -> int:
    """Return the bytes of a whole number or a text such as `400MiB` or `1.5 GB`; case does not matter.

    Raise ValueError with the value and the known units.
    """
    return round(_parse(value, _BYTES, "a size such as 400MiB or 1.5GB"))


def parse_seconds(value: object) -> float:
    """Return the seconds of a number or a text such as `90s` or `1.5h`. Raise ValueError like `parse_bytes`."""
    return _parse(value, _SECONDS, "a time such as 90s, 10min or 1.5h")


def probability_text(probability: float) -> str:
    """Return a probability in whole per cent; one that rounds to certainty, which no measurement gives, as a bound."""
    return f"{probability:.0%}" if probability < 0.995 else "more than 99%"


def time_setting(seconds: float) -> str:
    """Return a time as people write it into a job file, in the largest unit of which it is a multiple: `10min`."""
    unit, scale = next((each for each in reversed(_SECONDS.items()) if seconds % each[1] == 0), ("s", 1.0))
    return f"{seconds / scale:g}{unit}"


def duration_text(seconds: float) -> str:
    """Return a duration for people: `4 s`, `1 min 12 s` or `2 h 05 min`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def number_of(count: int, noun: str, plural: str | None = None) -> str:
    """Return a count with its noun: `1 step` or `2 steps`; `plural` where it is more than an s."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def _parse(value: object, units: dict[str, float] | dict[str, int], example: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST:
        return float(value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    scale = {name.lower(): factor for name, factor in units.items()}.get(match[2].lower()) if match else None
    if match is None or scale is None:
        raise ValueError(f"{value!r} is not {example}; units are {', '.join(units)}")
    return float(match[1]) * scale


def check_measured(measured: object) -> None:
    """Raise ValueError, with the field, for a number in the dataclass that is negative or not finite."""
    for field in fields(measured):  # type: ignore[arg-type]
        value = getattr(measured, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not (math.isfinite(number) and number >= 0):
                raise ValueError(f"{field.name} is {number}, which cannot be a measured value")
