"""Validity of a plan that was measured on one workload for another one.

| changed | verdict | why |
|---|---|---|
| model, but not its name | invalid | other layers: the split may not even fit, every cost differs |
| data type in which gradients are summed | re-measure | other bytes and reductions, the same layers |
| accelerator, device name, compute capability | invalid | other devices: every measured second and byte differs |
| model name, order of the same lengths | valid | for people; the same packs in another order |
| number of devices | re-measure | the plan runs when they suffice (the launch checks), but another may be faster |
| device memory, memory limit | re-measure | the plan may not fit any more, or may recompute more than it needs |
| driver, software, processor, cores, machine memory | re-measure | seconds drift, the best plan seldom |
| power limit of the devices | re-measure | computation takes longer, exchanges do not |
| links, topology, machines | re-measure | communication takes another time |
| the database that measured it | re-measure | machines that look alike differ |
| numbers, lengths, targets of the samples, over-size rule, global batch | re-measure | other packs and micro-batches |

Fields that are not listed mean `re-measure`, so that a new field cannot make a stale plan look valid.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Any, TypeAlias, cast

from trials.units import size_setting
from trials.workload import Workload

Now: TypeAlias = Callable[[Workload, int], Workload]
"""Returns the workload for which a plan should hold that was measured on the given one, by a number of groups of ranks
at the same time."""


def parallel_of(settings: Mapping[str, object]) -> int:
    """Return on how many groups of ranks the trials of a study with these settings ran at the same time."""
    stored = settings.get("parallel")
    return stored if isinstance(stored, int) and stored > 0 else 1


class Verdict(StrEnum):
    """How far the measurements of a plan can be used, from best to worst."""

    VALID = "valid"
    """Use it."""
    REMEASURE = "re-measure"
    """A good first guess: measure it again before trusting its figures."""
    INVALID = "invalid"
    """Its figures do not apply here."""


_MEBI = 1 << 20
_OF_JOB = {"memory_limit_bytes": "hardware.memory_limit"}


def spelled(field: str) -> str:
    """Return the name of a field for people: the job's, where that is another one."""
    return _OF_JOB.get(field, field)


def shown(field: str, value: object) -> str:
    """Return the value of a field for people: sizes as a job file has them, or rounded."""
    if not (field.endswith("_bytes") and isinstance(value, int)):
        return str(value)
    return f"{value / _MEBI:.1f} MiB" if value % _MEBI or not value else size_setting(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One field that differs."""

    field: str
    """Dotted: `hardware.driver`."""
    then: object
    now: object
    verdict: Verdict
    """Verdict for this change alone."""

    def __str__(self) -> str:
        if isinstance(self.then, tuple):  # the histogram, too long to show
            return f"{self.field} changed"
        if self.field == _ELSEWHERE:
            return f"measured elsewhere and imported ({self.then})"
        then, now = (shown(self.field, value) for value in (self.then, self.now))
        return f"{spelled(self.field)} was {then}, now {now}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Validity:
    """The verdict and its reasons, in the order of the workload's fields."""

    verdict: Verdict
    changes: tuple[Change, ...]


_INVALIDATING = ("model.", "hardware.accelerator", "hardware.device_name", "hardware.compute_capability")
_ELSEWHERE = "measured with"
_GRADIENTS = "model.gradient_dtype"
_HARMLESS = ("model.name", "data.lengths_digest")


def validity(then: Workload, now: Workload, *, imported_from: str | None = None) -> Validity:
    """Compare the workload of a measurement with the present one; the worst change decides.

    An imported measurement is at best `re-measure`: it was not taken on these very devices.
    """
    changes = tuple(
        Change(field=field, then=before, now=after, verdict=_verdict(field))
        for field, before, after in _differing(then, now)
    )
    if imported_from is not None:
        changes += (Change(field=_ELSEWHERE, then=imported_from, now="this database", verdict=Verdict.REMEASURE),)
    worst = max((change.verdict for change in changes), key=list(Verdict).index, default=Verdict.VALID)
    return Validity(verdict=worst, changes=changes)


def _differing(then: object, now: object, prefix: str = "") -> Iterator[tuple[str, object, object]]:
    """Yield (dotted field, value then, value now) for the values that differ in two dataclasses of one type."""
    for field in fields(cast(Any, then)):
        before, after = getattr(then, field.name), getattr(now, field.name)
        if before == after:
            continue
        if is_dataclass(before):
            yield from _differing(before, after, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", before, after


def _verdict(field: str) -> Verdict:
    if field in _HARMLESS:
        return Verdict.VALID
    if field == _GRADIENTS:
        return Verdict.REMEASURE
    return Verdict.INVALID if field.startswith(_INVALIDATING) else Verdict.REMEASURE


def leaves(value: object, prefix: str = "") -> dict[str, object]:
    """Return the values of a dataclass and of nested ones by dotted field."""
    if not is_dataclass(value):
        return {prefix.removesuffix("."): value}
    found: dict[str, object] = {}
    for field in fields(value):
        found |= leaves(getattr(value, field.name), f"{prefix}{field.name}.")
    return found
