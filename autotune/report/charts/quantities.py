"""Quantities as text for people."""

_KIBI, _MEBI, _GIBI = 1 << 10, 1 << 20, 1 << 30
PLUS_MINUS = "\u00b1"
TIMES = "\u00d7"
_LEAST_SECONDS = 1e-9
"""Shorter times are what rounding leaves of 0."""


class Memory:
    """The unit of bytes that suits the largest of some amounts."""

    def __init__(self, *amounts: float) -> None:
        most = max(amounts, default=0.0)
        self.unit, self._bytes = ("GiB", _GIBI) if most >= 8 * _GIBI else ("MiB", _MEBI)

    def of(self, amount: float) -> float:
        """Return the amount in this unit, to four digits."""
        return float(f"{amount / self._bytes:.4g}")

    def text(self, amount: float) -> str:
        return f"{self.of(amount):,.4g} {self.unit}"


def bytes_text(amount: float) -> str:
    """Return an amount of memory in the largest unit that leaves at least 1."""
    for unit, size in (("GiB", _GIBI), ("MiB", _MEBI), ("KiB", _KIBI)):
        if amount >= size:
            return f"{amount / size:.4g} {unit}"
    return f"{amount:.0f} bytes"


def seconds_text(seconds: float) -> str:
    """Return a duration with a unit that leaves two to four digits."""
    if abs(seconds) < _LEAST_SECONDS:
        return "0 ms"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.3g} ms"
    if abs(seconds) < 3000:
        return f"{seconds:.4g} s"
    return f"{seconds / 60:.4g} min" if abs(seconds) < 36_000 else f"{seconds / 3600:,.4g} h"


def percent_text(share: float) -> str:
    return f"{share:z.1%}"


def with_error(value: float, error: float, digits: int = 1) -> str:
    return f"{value:,.{digits}f} {PLUS_MINUS} {error:.{digits}f}"
