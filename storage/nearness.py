"""Distance between the workload of a stored plan and a given one, field by field.

The distance is the sum, over the fields that differ, of a weight times the difference: 1 for two different texts, the
number of doublings between two numbers, and the total variation between two histograms. The weights, at the end of
this file, are chosen by judgment, not fitted; doubling the ranks weighs 10.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from storage.validity import leaves, shown, spelled
from trials.workload import Hardware, Software, Workload

Fields = Mapping[str, object]
"""Values by dotted field: `hardware.driver`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One field that differs, and what it adds to the distance."""

    field: str
    """Dotted: `hardware.driver`."""
    then: object
    now: object
    weight: float
    """Distance for a whole difference: another text, or a doubling of a number."""
    why: str
    """Consequence for a plan."""
    distance: float
    """The weight times how much the values differ."""

    def __str__(self) -> str:
        then, now = (shown(self.field, value) for value in (self.then, self.now))
        values = "" if isinstance(self.then, tuple) else f" {then} -> {now}"  # a histogram is too long
        return f"{spelled(self.field)}{values} (adds {self.distance:.3g}: {self.why})"


def fields_of(workload: Workload) -> Fields:
    """Return the fields of a workload."""
    return leaves(workload)


def fields_of_machine(hardware: Hardware, software: Software) -> Fields:
    """Return the fields that are known without a job; model, data and batch then count as equal."""
    return {**leaves(hardware, "hardware."), **leaves(software, "software.")}


def differences(then: Fields, now: Fields) -> tuple[Difference, ...]:
    """Compare the fields that both have; the largest distance comes first."""
    found = (_difference(field, value, now[field]) for field, value in then.items() if field in now)
    return tuple(sorted((one for one in found if one is not None), key=lambda one: -one.distance))


def distance(found: Iterable[Difference]) -> float:
    # Exact in any order, so that equal differences give equal distances.
    return math.fsum(one.distance for one in found)


def _difference(field: str, then: object, now: object) -> Difference | None:
    weight, why = _WEIGHTS.get(field, _OTHER)
    if then == now or weight == 0:
        return None
    return Difference(field=field, then=then, now=now, weight=weight, why=why, distance=weight * _amount(then, now))


def _amount(then: object, now: object) -> float:
    if isinstance(then, int | float) and isinstance(now, int | float) and then > 0 < now:
        return abs(math.log2(then / now))
    if isinstance(then, tuple) and isinstance(now, tuple):
        return _total_variation(then, now)
    return 1.0


def _total_variation(then: tuple[tuple[int, int, int], ...], now: tuple[tuple[int, int, int], ...]) -> float:
    """Return the total variation between two histograms of (units, tokens, samples), from 0, equal, to 1, disjoint."""
    shares: list[dict[tuple[int, int], float]] = []
    for histogram in (then, now):
        total = sum(samples for *_, samples in histogram) or 1
        shares.append({(units, tokens): samples / total for units, tokens, samples in histogram})
    buckets = shares[0].keys() | shares[1].keys()
    return math.fsum(abs(shares[0].get(bucket, 0.0) - shares[1].get(bucket, 0.0)) for bucket in buckets) / 2


def _weighted(weight: float, why: str, names: str) -> dict[str, tuple[float, str]]:
    return dict.fromkeys(names.split(), (weight, why))


# A choice: fields that have no weight of their own, such as new ones, are named but decide only between equals.
_OTHER = (1.0, "worth naming")
_SPLIT = "another split or recomputation may be best"
# Choices by order of size: workloads are ranked by the sum, so one field of a row outweighs several of the rows below.
_WEIGHTS = {
    **_weighted(200, "another kind of machine", "hardware.accelerator"),
    **_weighted(100, "every measured second differs", "hardware.device_name"),
    **_weighted(40, "other layers", "model.family"),
    **_weighted(20, "other kernels", "hardware.compute_capability model.dtype model.compiler"),
    **_weighted(20, "other packs", "data.histogram"),
    **_weighted(10, _SPLIT, "hardware.devices hardware.nodes hardware.device_memory_bytes memory_limit_bytes"),
    **_weighted(10, _SPLIT, "model.vision_layers model.language_layers model.parameters model.trained"),
    **_weighted(5, "other shares of a step's parts", "model.unit_flops model.token_flops model.square_flops"),
    **_weighted(5, "other shares of a step's parts", "model.target_flops"),
    **_weighted(5, "other shares of a step's parts", "hardware.link hardware.power_limit_watts global_batch_samples"),
    **_weighted(2, "seconds drift", "software.torch software.deepspeed hardware.cpu_name oversize"),
    **_weighted(0, "for people", "model.name data.lengths_digest"),
    **_weighted(
        0, "covered by the histogram", "data.samples data.text_only_samples data.vision_units data.text_tokens"
    ),
    **_weighted(0, "covered by the histogram", "data.longest_text_tokens data.most_vision_units"),
    **_weighted(0, "a sum over samples: only its share counts, for the head alone", "data.target_tokens"),
}
