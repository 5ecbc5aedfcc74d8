"""Memory of a pipeline stage: static bytes, and the bytes that its packs keep under 1F1B."""

from collections.abc import Callable, Hashable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from autotune.prediction.columns import CONSTANT, EVERY
from autotune.prediction.layer_bytes import DEFERRING_MOMENTS, MOMENTS, PLACES, LayerBytes
from autotune.prediction.parameters import Parameters
from autotune.prediction.parts import LANGUAGE, VISION, Parts
from autotune.prediction.simulation.zero_bubble import waiting_from
from autotune.prediction.sizes import EpochSizes
from trials.arrays import Floats, Ints
from trials.costs.coefficients import KINDS
from trials.costs.layer_costs import LayerCosts
from trials.engine.static_memory import stages_static_bytes
from trials.plan import Layout

_Found: TypeAlias = WeakKeyDictionary[EpochSizes, dict[Hashable, tuple[float, float]]]
"""Bytes of the stages of an epoch that were computed one by one; they go with its sizes."""
_UNMODELLED = 0.01
"""Share of the kept bytes outside the layers; on measured stages it stayed below 0.4 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Peak bytes of a stage on its fullest rank, as an interval."""

    static: float
    """Weights, gradients and optimizer states; included in the other three."""
    low: float
    expected: float
    high: float
    host: float = 0.0
    """Bytes that its fullest rank offloads to the host's memory at once."""

    def keeping(self, factor: float) -> "StageBytes":
        """Return the interval if packs keep a multiple of the bytes."""
        low, expected, high = (
            self.static + factor * (each - self.static) for each in (self.low, self.expected, self.high)
        )
        return replace(self, low=low, expected=expected, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakParts:
    """Parts of the expected peak bytes of a stage."""

    static: float
    """Weights, gradients and optimizer states."""
    kept: float
    """Activations of layers that are not recomputed, of all packs in flight."""
    recomputed: float
    """Inputs of the layers that are recomputed, and the activations of the one that is being recomputed."""
    transient: float
    """Gradients and workspaces of the layer that runs, with ZeRO 3 its weights, and what is offloaded on its way."""

    @property
    def total(self) -> float:
        return self.static + self.kept + self.recomputed + self.transient


class StageMemory:
    """Prediction of the memory of the stages of any plan of one model."""

    def __init__(self, costs: LayerCosts, element_bytes: int, factors: tuple[float, float] = (1.0, 1.0)) -> None:
        """`element_bytes` is the size of a weight in the training's dtype; `factors` of static and of kept bytes."""
        self._static_factor, kept = factors
        self._parameters, self._head = Parameters(costs), costs["head"]
        self._element_bytes = element_bytes

        def of_layers(factor: float | Floats) -> Callable[[int, Layout], LayerBytes]:
            return cache(lambda degree, layout: LayerBytes.of(costs, degree, layout, factor, element_bytes))

        self._bytes = of_layers(kept)
        self._found: _Found = WeakKeyDictionary()
        self._upper = copy(self)
        """The same, where each kind of layer keeps as much more as the error of its fit."""
        errors = np.array([costs[kind].bytes_error for kind in KINDS])
        self._upper._bytes, self._upper._found = of_layers(kept * (1 + errors[:, None])), WeakKeyDictionary()

    def expected(self, parts: Parts, layout: Layout, numbers: Ints | int, sizes: EpochSizes) -> Floats:
        """Return the expected peak bytes of each of `parts` as the stage of its number, [stages].

        The peak is static bytes plus the most that packs keep: either all packs in flight under 1F1B as a backward pass
        begins, or all but one and what that one keeps while one of its layers is recomputed. It is exact: packs in
        flight are those that follow each other in a step of the epoch. Deferred weight gradients are not counted.
        """
        expected: Floats = self.static(parts, layout) + self._most(parts, layout, numbers, sizes)[1]
        return expected

    def intervals(
        self, of_levels: Sequence[Parts], layout: Layout, numbers: Ints, sizes: EpochSizes
    ) -> tuple[StageBytes, ...]:
        """Return the interval of each stage of `of_levels`, as packs of each level recompute it, by its number.

        Intervals come from the errors of the fitted bytes, each of the bytes of its kind of layer, of bytes outside the
        layers, and of where the targets of a pack lie that ranks share.
        """
        waiting, most = self._waiting_and_most(of_levels, layout, numbers, sizes)
        wait_at_most, at_most = self._upper._waiting_and_most(of_levels, layout, numbers, sizes)
        # The low end has the targets of shared packs dealt evenly over the ranks.
        least = waiting
        if sizes.evenly is not sizes:
            least, _ = self._waiting_and_most(of_levels, layout, numbers, sizes.evenly)
        # Only what waiting packs keep is certain; which layer runs at the peak is an assumption.
        low = np.maximum(0.0, (1 - _UNMODELLED) * least - (wait_at_most - waiting))
        static = self.static(of_levels[0], layout)
        on_host = self._on_host(of_levels, layout, numbers, sizes)
        columns = (static, static + low, static + most, static + at_most + _UNMODELLED * most, on_host)
        names = ("static", "low", "expected", "high", "host")
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return tuple(StageBytes(**dict(zip(names, row, strict=True))) for row in rows)

    def expected_of_levels(
        self, of_levels: Sequence[Parts], layout: Layout, numbers: Ints, sizes: EpochSizes
    ) -> tuple[float, ...]:
        """Return `expected` of each of `intervals`, in less than half of their time."""
        _, most = self._waiting_and_most(of_levels, layout, numbers, sizes)
        return tuple((self.static(of_levels[0], layout) + most).tolist())

    def peak_parts(self, of_levels: Sequence[Parts], layout: Layout, number: int, sizes: EpochSizes) -> PeakParts:
        """Return the parts of the expected peak bytes of one stage, the one of this number, of a plan."""
        stage = [parts[number : number + 1] for parts in of_levels]
        peaks = self._peaks(stage, layout, number, sizes)
        kept, recomputed, transient = peaks[np.argmax(peaks.sum(axis=1))].tolist()
        static = float(self.static(stage[0], layout)[0])
        return PeakParts(static=static, kept=kept, recomputed=recomputed, transient=transient)

    def heaviest_step(self, of_levels: Sequence[Parts], layout: Layout, number: int, sizes: EpochSizes) -> int:
        """Return the step of the epoch in which the stage of this number is expected to keep most bytes."""
        stage = [parts[number : number + 1] for parts in of_levels]
        of_packs = np.max([case.sum(axis=0) for case in self._cases(stage, layout, number, sizes)], axis=0)
        # Packs come step by step, and only the last step may have fewer.
        return int(of_packs.argmax() // sizes.blocks[0][0].size)

    def kept(self, of_levels: Sequence[Parts], layout: Layout, sizes: EpochSizes) -> Floats:
        """Return the bytes that each pack keeps on each stage between its two passes, [packs, stages].

        `of_levels` are the stages with what packs of each level recompute.
        """
        return self._of_packs(of_levels, layout, sizes, lambda layers, parts: layers.of_packs(parts, len(KINDS)))

    def deferred(self, of_levels: Sequence[Parts], layout: Layout, sizes: EpochSizes) -> Floats:
        """Return the bytes that each pack keeps until its deferred weight gradients are computed, [packs, stages]."""
        deferred = self._of_packs(of_levels, layout, sizes, lambda layers, parts: layers.deferred(parts))
        deferred *= of_levels[0].most_deferred > 0
        return deferred

    def _of_packs(
        self,
        of_levels: Sequence[Parts],
        layout: Layout,
        sizes: EpochSizes,
        coefficients: Callable[[LayerBytes, Parts], Floats],
    ) -> Floats:
        degrees, sizes = sizes.epoch.packing.degrees, sizes.in_chunks(self._head)
        every = np.stack(
            [
                sizes.table @ coefficients(self.of_layers(degree, layout), parts).T
                for degree, parts in zip(degrees, of_levels, strict=True)
            ]
        )
        found: Floats = every[sizes.levels, np.arange(len(sizes.levels))]
        return found

    def _on_host(self, of_levels: Sequence[Parts], layout: Layout, numbers: Ints | int, sizes: EpochSizes) -> Floats:
        """Return the bytes of packs in flight in the host's memory, [stages], as if each were the heaviest pack."""
        if layout.offload == "none":
            return np.zeros(len(of_levels[0]))
        heaviest = [
            _largest_alone(packs, self.of_layers(packs.degree, layout).on_host(parts))
            for packs, parts in zip(sizes.of_levels, of_levels, strict=True)
            if len(packs.table)  # a level may have none
        ]
        # The host runs ahead of the device by a pack, whose blocks are used again once the device has fetched them. It
        # waits for the device where it receives tokens, as on every stage but the first.
        held = np.minimum(layout.pipeline - numbers + (numbers == 0), sizes.epoch.micro_batches)
        on_host: Floats = held * np.max(heaviest, axis=0)
        return on_host

    def of_heaviest(self, parts: Parts, layout: Layout, sizes: EpochSizes) -> tuple[Floats, Floats]:
        """Return the bytes of the heaviest pack (until its backward pass, while that runs), both [stages]."""
        of_layers, sizes = self.of_layers(sizes.degree, layout), sizes.in_chunks(self._head)
        of_packs = of_layers.of_packs(parts, len(KINDS))
        kept = _largest_alone(sizes, of_packs)
        running = _largest_alone(sizes, of_packs + of_layers.beginning(parts))
        for place in PLACES:
            if len(rows := of_layers.needs_most_at(parts, place)):
                later = _largest_alone(sizes, np.sum(of_layers.running(parts[rows], place), axis=0))
                running[rows] = np.maximum(running[rows], later)
        return kept, running

    def freed(self, in_flight: Ints, layout: Layout, sizes: EpochSizes, rungs: tuple[int, int]) -> Floats:
        """Return the most bytes that recomputing saves in stages that have `in_flight` packs, [6, stages].

        They are those of one of the first `rungs` of vision layers and of language layers, those of a later one, and
        what the last layer of either kind saves in addition.
        """
        of_layers, sizes = self.of_layers(sizes.degree, layout), sizes.in_chunks(self._head)
        rows = np.concatenate([of_layers.freed(rungs), of_layers.shared[[VISION, LANGUAGE]]])
        of_stages = np.tile(rows, (len(in_flight), 1))
        saved = _largest(sizes, np.repeat(in_flight, len(rows)), of_stages, of_stages)
        freed: Floats = saved.reshape(-1, len(rows)).T
        return freed

    def static(self, parts: Parts, layout: Layout) -> Floats:
        """Return the bytes of weights, gradients and optimizer states, [stages]."""
        held, frozen = (count(parts, layout.tensor) for count in (self._parameters.held, self._parameters.frozen))
        static: Floats = stages_static_bytes(held, frozen, element_bytes=self._element_bytes, layout=layout)
        return self._static_factor * static

    def of_layers(self, degree: int, layout: Layout) -> LayerBytes:
        """Return the bytes of each kind of layer, for packs that `degree` data ranks share."""
        return self._bytes(degree, layout)

    def _waiting_and_most(
        self, of_levels: Sequence[Parts], layout: Layout, numbers: Ints, sizes: EpochSizes
    ) -> tuple[Floats, Floats]:
        """Return (bytes while all packs in flight wait for their backward pass, most bytes), both [stages]."""
        if len(of_levels) == 1 and not layout.zero_bubble:
            return self._most(of_levels[0], layout, numbers, sizes)
        of_stages = (
            self._waiting_and_most_of_one([parts[row : row + 1] for parts in of_levels], layout, number, sizes)
            for row, number in enumerate(numbers.tolist())
        )
        waiting, most = np.array([*of_stages]).T
        return waiting, most

    # --- one level ---

    def _most(self, parts: Parts, layout: Layout, numbers: Ints | int, sizes: EpochSizes) -> tuple[Floats, Floats]:
        """Return (bytes while all packs in flight wait for their backward pass, most bytes), both [stages]."""
        sizes = sizes.in_chunks(self._head)
        in_flight = np.broadcast_to(np.minimum(layout.pipeline - numbers, sizes.epoch.micro_batches), len(parts))
        of_layers = self.of_layers(sizes.degree, layout)
        kept = of_layers.of_packs(parts, len(KINDS))
        waiting = _largest(sizes, in_flight, kept + of_layers.beginning(parts), kept)
        most = waiting.copy()
        for place in PLACES:
            if len(rows := of_layers.needs_most_at(parts, place)):
                running = np.sum(of_layers.running(parts[rows], place), axis=0)
                most[rows] = np.maximum(most[rows], _largest(sizes, in_flight[rows], running, kept[rows]))
        return waiting, most

    # --- several levels ---

    def _waiting_and_most_of_one(
        self, stage: Sequence[Parts], layout: Layout, number: int, sizes: EpochSizes
    ) -> tuple[float, float]:
        """Return `_waiting_and_most` of one stage; plans that are solved one after the other have many stages alike."""
        found = self._found.setdefault(sizes, {})
        key = layout, number, *(part.key for part in stage)
        if key not in found:
            waiting, *others = (case.sum(axis=0).max() for case in self._cases(stage, layout, number, sizes))
            found[key] = waiting, max(waiting, *others)
        return found[key]

    def _peaks(self, stage: Sequence[Parts], layout: Layout, number: int, sizes: EpochSizes) -> Floats:
        """Return the peaks of one stage by the parts of `PeakParts` but the static one, [cases, 3]."""
        return np.array([every[:, every.sum(axis=0).argmax()] for every in self._cases(stage, layout, number, sizes)])

    def _cases(self, stage: Sequence[Parts], layout: Layout, number: int, sizes: EpochSizes) -> list[Floats]:
        """Return what one stage keeps around the backward pass of each pack of each rank, step by step, by case.

        Each case is [3, packs], by the parts of `PeakParts` but the static one. `stage` is the stage as packs of each
        level recompute it. The first case has all packs in flight as a backward pass begins, each further case is a
        moment of the pass, and the last case ends it. They are exact: packs in flight are those of the epoch, each
        keeps what is kept at its level, and those before have deferred weight gradients, as have its own later layers.
        """
        sizes = sizes.in_chunks(self._head)
        in_flight = min(layout.pipeline - number, sizes.epoch.micro_batches)
        most_deferred = int(stage[0].most_deferred[0])
        defers = most_deferred > 0
        known = DEFERRING_MOMENTS if layout.zero_bubble else MOMENTS
        # Most stages hold layers of one kind.
        moments = [moment for moment in known if stage[0].layers[0, moment.place[0]]]
        waiting, deferred, beginning, ending, *later = np.zeros((4 + len(moments), 3, len(sizes.table)))
        for level, (degree, part) in enumerate(zip(sizes.epoch.packing.degrees, stage, strict=True)):
            of_layers = self.of_layers(degree, layout)
            packs = np.flatnonzero(sizes.levels == level)
            table = sizes.table[packs]
            kept = of_layers.split(part, len(KINDS))
            # A pack has transient bytes, the third part, only while its backward pass runs.
            waiting[:2, packs] = (table @ np.vstack(kept).T).T
            beginning[:, packs] = (table @ np.vstack((*kept, of_layers.beginning(part))).T).T
            if defers:
                deferred[0, packs] = ending[0, packs] = table @ of_layers.deferred(part)[0]
            for moment, of_moment in zip(moments, later, strict=True):
                left, (kind, _) = moment.left(part), moment.place
                if left.layers[0, kind] if layout.zero_bubble else len(of_layers.needs_most_at(part, moment.place)):
                    of_moment[:, packs] = (table @ np.vstack(of_layers.running(left, moment.place)).T).T
                    if defers:
                        of_later = of_layers.deferred(part) - of_layers.deferred(left, kind + 1)
                        of_moment[0, packs] += table @ of_later[0]
        first_deferred = partial(waiting_from, stages=layout.pipeline, stage=number, most=most_deferred)
        cases = (beginning, *later, ending) if layout.zero_bubble else (beginning, *later)
        packs, others = _others_in_flight(waiting, deferred, in_flight, first_deferred, sizes)
        return [case.take(packs, axis=1) + others for case in cases]


def _largest(sizes: EpochSizes, in_flight: Ints, running: Floats, behind: Floats) -> Floats:
    """Return the largest cost of as many packs in flight, [stages].

    `running` are the costs per column of the pack whose backward pass runs, `behind` those of the others, [stages, 5].
    """
    largest = np.zeros(len(running))
    # Stages with equally many packs in flight have the same candidates, so one product serves all of them.
    order = np.argsort(in_flight, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(in_flight[order])) + 1):
        if len(rows):
            # Costs that depend on fewer columns have far fewer candidates: only the last stage depends on targets.
            packs = sizes.heaviest(int(in_flight[rows[0]]), _columns(running[rows], behind[rows]))
            largest[rows] = (packs[:, 0] @ running[rows].T + packs[:, 1] @ behind[rows].T).max(axis=0)
    return largest


def _largest_alone(sizes: EpochSizes, coefficients: Floats) -> Floats:
    largest: Floats = (sizes.heaviest(1, _columns(coefficients))[:, 0] @ coefficients.T).max(axis=0)
    return largest


def _columns(*coefficients: Floats) -> tuple[int, ...]:
    """Return the columns of sizes on which any of these costs [costs, 5] depends, and the constant one."""
    depends = np.any([each.any(axis=0) for each in coefficients], axis=0)
    return tuple(column for column in EVERY if column == CONSTANT or depends[column])


def _others_in_flight(
    waiting: Floats, deferred: Floats, in_flight: int, first_deferred: Callable[[int], Ints], sizes: EpochSizes
) -> tuple[Ints, Floats]:
    """Return the packs of an epoch, and the bytes of those behind and before each while its backward pass runs.

    `waiting` are the bytes of the packs behind, in flight, and `deferred` those of the packs before, from the one that
    `first_deferred` returns for each of a number of micro-batches; [parts, packs] each, like the result.
    """
    packs, others = list[Ints](), list[Floats]()
    for block in sizes.blocks:
        # Backward passes keep the order of the packs, so those behind a pack are the ones that follow it.
        before, ahead = (_sums_before(each[:, block]) for each in (waiting, deferred))
        first = np.arange(block.shape[1])
        behind = before[:, :, np.minimum(first + in_flight, block.shape[1])] - before[:, :, first + 1]
        behind += ahead[:, :, first] - ahead[:, :, first_deferred(len(first))]
        packs.append(block.reshape(-1))
        others.append(behind.reshape(len(waiting), -1))
    return np.concatenate(packs), np.concatenate(others, axis=1)


def _sums_before(values: Floats) -> Floats:
    """Return the sums along the third axis up to each value, from 0 to that of all; [..., ..., one more, ...]."""
    sums = np.zeros((*values.shape[:2], values.shape[2] + 1, *values.shape[3:]))
    np.cumsum(values, axis=2, out=sums[:, :, 1:])
    return sums
