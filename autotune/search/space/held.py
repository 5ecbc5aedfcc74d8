"""The plans of a job that a trainer can hold, and the axes of a search among them."""

from collections.abc import Iterator
from dataclasses import replace

from autotune.prediction.predictor import EpochOf
from autotune.search.space.abilities import Target
from autotune.search.space.capacities import holds_all, lengths
from autotune.search.space.sequential import PackOrder, order_of
from autotune.search.space.space import Axes, packings_of
from trials.data.epoch import Epoch
from trials.errors import DataError, InvalidPlan
from trials.plan import MOST_UNITS, Packed, Packing, Padded, Plan
from trials.workload import Workload

# A choice: with 8 data ranks every eighth length has packs of which none is left over.
LENGTHS = 40
"""Lengths that are tried for packs that a trainer has to rebuild from their order."""
_SAFE = 2
"""Tokens by which a trainer may count more or fewer for each sample, as by another end of a turn."""
_FURTHER = 4
"""Lengths that are tried for that, behind the first with which packs are rebuilt."""
_SHORTER = 1 / 512
"""Share of a length by which the next one is shorter."""


class Holding:
    """The plans of a job that a trainer can hold."""

    def __init__(self, target: Target, workload: Workload, epoch_of: EpochOf) -> None:
        """`epoch_of` returns the whole first epoch of a packing over a number of data ranks."""
        self.target = target
        self.abilities = target.abilities
        self._workload, self._epoch_of = workload, epoch_of
        self._rebuilt: dict[tuple[Packing, int], bool] = {}

    def holds(self, plan: Plan) -> bool:
        """Return whether the trainer can hold a plan as it is."""
        return not any(self.missing(plan))

    def missing(self, plan: Plan) -> tuple[str, ...]:
        """Return what of the plan the trainer does not have, in words; empty where it can hold the plan."""
        if missing := self.abilities.missing(plan):
            return missing
        return () if self._rebuilds(plan) else ("packs whose ends the order of the samples does not tell",)

    def _rebuilds(self, plan: Plan) -> bool:
        if isinstance(plan.packing, Padded) or self.abilities.packs != "in order":
            return True
        key = plan.packing, plan.layout.data
        if key not in self._rebuilt:
            epoch = self.epoch(*key)
            self._rebuilt[key] = epoch is not None and order_of(epoch) is not None
        return self._rebuilt[key]

    def nearest(self, packing: Packed, data: int, count: int = LENGTHS) -> tuple[Packed, PackOrder] | None:
        """Return the packs, or the nearest shorter ones, whose order tells the trainer of `data` ranks where they end.

        Of the `count` lengths a few more are tried for an order that stays the same where the trainer counts some
        tokens otherwise. Packs stay long enough for the longest sample where it would be lost.
        """
        least = self._workload.data.longest_text_tokens if holds_all(self._workload) else 1
        found, further = None, _FURTHER
        for other in _shorter(packing, count, least):
            further -= found is not None
            if not further:
                break
            epoch = self.epoch(other, data)
            if epoch is None or not (other is packing or epoch.keeps_batch):
                continue
            order = order_of(epoch)
            if order is not None and (found is None or _is_safe(order)):
                found = other, order
                if _is_safe(order):
                    break
        return found

    def epoch(self, packing: Packing, data: int) -> Epoch | None:
        """Return the first epoch; None where a step has too few samples for such packs."""
        try:
            return self._epoch_of(packing, data)
        except (DataError, InvalidPlan):
            return None

    def samples(self) -> Iterator[int]:
        """Yield the numbers of samples of padded micro-batches: 1, 2, 4 and so on, up to those of a step."""
        samples, devices = 1, self._workload.hardware.devices
        while samples * devices <= self._workload.global_batch_samples:
            if self.epoch(Padded(samples=samples), devices) is not None:
                yield samples
            samples *= 2

    def within(self, axes: Axes, *, has_packs: bool, has_capacities: bool) -> Axes:
        """Return axes with the layouts of these, and the packings and the recomputation of the trainer.

        Micro-batches may be unpacked unless the job `has_packs` of its own. Where the trainer rebuilds packs from their
        order, capacities are lengths with which it does, unless the job `has_capacities`.
        """
        recompute = "towers" if axes.recompute == "fit" else axes.recompute
        axes = replace(axes, padded=() if has_packs else tuple(self.samples()), recompute=recompute, holds=self.holds)
        if self.abilities.packs == "none":
            return replace(axes, capacities=())
        if self.abilities.packs != "in order" or has_capacities:
            return axes
        # Its packs are full by their length alone, so each slack would only ask for another order.
        axes = replace(axes, qv_slacks=axes.qv_slacks[:1], qt_slacks=axes.qt_slacks[:1])
        data = self._workload.data
        qv = min(max(data.vision_units, 1), MOST_UNITS)
        tried = lengths(data, self._workload.global_batch_samples, hold_all=holds_all(self._workload))
        packings = packings_of(replace(axes, capacities=tuple((qv, qt) for qt in tried), padded=())).usual()
        devices = self._workload.hardware.devices
        rebuilt = (self.nearest(each, devices) for each in packings if isinstance(each, Packed))
        return replace(axes, capacities=tuple(dict.fromkeys((each.qv, each.qt) for each, _ in filter(None, rebuilt))))


def _is_safe(order: PackOrder) -> bool:
    fewer, more = order.spare
    return min(-fewer, more) >= _SAFE


def _shorter(packing: Packed, count: int, least: int) -> Iterator[Packed]:
    """Yield the packs, then shorter and shorter ones of at least this many tokens."""
    step = max(1, round(packing.qt * _SHORTER))
    slack = packing.qt - packing.qt_min
    yield packing
    for number in range(1, count):
        if (qt := packing.qt - number * step) < max(least, slack + 1):
            return
        yield replace(packing, qt=qt, qt_min=qt - slack)
