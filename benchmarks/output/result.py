"""What every benchmark prints: one JSON object with the machine, the rows and the checks."""

import json
import logging
import math
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from autotune.machine.hardware import this_machine

# As it is imported, DeepSpeed writes to stdout which accelerator it has found.
logging.getLogger("DeepSpeed").disabled = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A bar, and whether the measured value holds it."""

    name: str
    value: float | None
    """None when nothing was measured, or something that is no finite number, which holds no bar."""
    bar: float
    holds: bool


def at_most(name: str, values: Iterable[float], bar: float) -> Check:
    """Check that the largest value does not pass the bar."""
    value = _extreme(values, max)
    return Check(name=name, value=value, bar=bar, holds=value is not None and value <= bar)


def at_least(name: str, values: Iterable[float], bar: float) -> Check:
    """Check that the smallest value reaches the bar."""
    value = _extreme(values, min)
    return Check(name=name, value=value, bar=bar, holds=value is not None and value >= bar)


def _extreme(values: Iterable[float], of: Callable[[list[float]], float]) -> float | None:
    """Return one of the values; None without any, or where one is not finite: `max` and `min` pass over NaN."""
    found = [float(value) for value in values]
    return of(found) if found and all(map(math.isfinite, found)) else None


def show(progress: object) -> None:
    """Print a line on stderr at once; stdout is for the result alone."""
    print(progress, file=sys.stderr, flush=True)


def finish(rows: Sequence[Mapping[str, Any]], checks: list[Check]) -> NoReturn:
    """Print the result on stdout, and exit with 1 when a check does not hold."""
    machine = {**asdict(this_machine()), "python": platform.python_version(), "system": platform.platform()}
    json.dump({"machine": machine, "rows": rows, "checks": [asdict(check) for check in checks]}, sys.stdout, indent=1)
    print()
    sys.exit(0 if all(check.holds for check in checks) else 1)
