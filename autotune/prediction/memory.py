"""Memory of a pipeline stage: static bytes, and the bytes that its packs keep under 1F1B."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.prediction.costs import Array
from autotune.prediction.parts import LANGUAGE, VISION, Parts
from autotune.prediction.sizes import EpochSizes
from trials.data.records.sample import Ints
from trials.engine.static_memory import stages_static_bytes
from trials.layer_costs import KINDS, LayerCosts
from trials.plan import Layout

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
    """Gradients and workspaces of the layer that runs."""

    @property
    def total(self) -> float:
        return self.static + self.kept + self.recomputed + self.transient


class StageMemory:
    """Prediction of the memory of the stages of any plan of one model."""

    def __init__(self, costs: LayerCosts, element_bytes: int, factors: tuple[float, float] = (1.0, 1.0)) -> None:
        """`element_bytes` is the size of a weight in the training's dtype; `factors` of static and of kept bytes."""
        layers = [costs[kind] for kind in KINDS]
        self._static_factor, kept = factors
        self._kept = kept * _rows(layer.kept_bytes for layer in layers)
        self._shared = kept * _rows(layer.shared_bytes for layer in layers)
        self._transient = kept * _rows(layer.transient_bytes for layer in layers)
        self._inputs = kept * _rows(layer.recomputed_bytes for layer in layers)
        self._alone = self._kept + self._shared + self._transient
        self._errors = np.array([layer.bytes_error for layer in layers])
        self._parameters = np.array([layer.parameters for layer in layers])
        self._frozen = np.array([layer.frozen_parameters for layer in layers])
        self._element_bytes = element_bytes

    def expected(self, parts: Parts, layout: Layout, numbers: Ints | int, sizes: EpochSizes) -> Array:
        """Return the expected peak bytes of each of `parts` as the stage of its number, [stages].

        The peak is static bytes plus the most that packs keep: either all packs in flight under 1F1B as a backward pass
        begins, or all but one and what that one keeps while one of its layers is recomputed. This is exact for one pack
        in flight; for more, the pack whose layer costs most is assumed to run together with the heaviest others.
        """
        expected: Array = self._static(parts, layout) + self._most(parts, layout, numbers, sizes)[1]
        return expected

    def intervals(self, parts: Parts, layout: Layout, numbers: Ints, sizes: EpochSizes) -> tuple[StageBytes, ...]:
        """Return the interval of each of `parts` as the stage of its number.

        Intervals come from the errors of the fitted bytes and of bytes outside the layers.
        """
        return self._intervals(parts, layout, *self._most(parts, layout, numbers, sizes))

    def _intervals(self, parts: Parts, layout: Layout, waiting: Array, most: Array) -> tuple[StageBytes, ...]:
        static = self._static(parts, layout)
        error = (self._errors * (parts.layers > 0)).max(axis=1) + _UNMODELLED
        columns = (static, static + waiting * np.maximum(0.0, 1 - error), static + most, static + most * (1 + error))
        names = ("static", "low", "expected", "high")
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return tuple(StageBytes(**dict(zip(names, row, strict=True))) for row in rows)

    def intervals_of_levels(
        self, of_levels: Sequence[Parts], layout: Layout, sizes: EpochSizes
    ) -> tuple[StageBytes, ...]:
        """Return the intervals of the stages of one plan, given as they are for packs of each level."""
        numbers = np.arange(len(of_levels[0]))
        if len(of_levels) == 1:
            return self.intervals(of_levels[0], layout, numbers, sizes)
        return self._intervals(of_levels[0], layout, *self._most_of_levels(of_levels, layout, sizes))

    def peak_parts(self, part: Parts, layout: Layout, number: int, sizes: EpochSizes) -> PeakParts:
        """Return the parts of what `expected` gives for one stage."""
        in_flight = min(layout.pipeline - number, sizes.epoch.micro_batches)
        coefficients = self._split(part, len(KINDS))
        last = len(KINDS) - 1 - int(np.argmax(part.layers[0, ::-1] > 0))
        static = float(self._static(part, layout)[0])
        kept, inputs = _heaviest(sizes, in_flight, *coefficients)
        (transient,) = _heaviest(sizes, 1, self._transient[last])
        found = [PeakParts(static=static, kept=kept, recomputed=inputs, transient=transient)]
        others, inputs_of_others = _heaviest(sizes, in_flight - 1, *coefficients) if in_flight > 1 else (0.0, 0.0)
        for kind in (VISION, LANGUAGE):
            count, recomputed = part.layers[0, kind], part.recomputed[0, kind]
            if count > 0 and recomputed == count:  # see `_most`
                kept_before, inputs_before = self._split(part, kind)
                again = inputs_before + (recomputed - 1) * self._inputs[kind] + self._kept[kind] + self._shared[kind]
                kept, inputs, transient = _heaviest(sizes, 1, kept_before, again, self._transient[kind])
                found.append(
                    PeakParts(
                        static=static,
                        kept=others + kept,
                        recomputed=inputs_of_others + inputs,
                        transient=transient,
                    )
                )
        return max(found, key=lambda parts: parts.total)

    def kept(self, of_levels: Sequence[Parts], sizes: EpochSizes) -> Array:
        """Return the bytes that each pack keeps on each stage between its two passes, [packs, stages].

        `of_levels` are the stages as they are for packs of each level.
        """
        every = np.stack([sizes.table @ self._of_packs(parts, len(KINDS)).T for parts in of_levels])
        kept: Array = every[sizes.levels, np.arange(len(sizes.levels))]
        return kept

    def _most_of_levels(self, of_levels: Sequence[Parts], layout: Layout, sizes: EpochSizes) -> tuple[Array, Array]:
        """Return what `_most` does, where stages recompute as the level of each pack says; it is exact."""
        kept, whole = self.kept(of_levels, sizes), of_levels[0]
        in_flight = np.minimum(layout.pipeline - np.arange(len(whole)), sizes.epoch.micro_batches)
        last = len(KINDS) - 1 - np.argmax(whole.layers[:, ::-1] > 0, axis=1)
        waiting = _largest_in_flight(kept + sizes.table @ self._transient[last].T, kept, in_flight, sizes)
        most = waiting.copy()
        for kind in (VISION, LANGUAGE):
            running = np.zeros_like(kept)
            for level, parts in enumerate(of_levels):
                rows = np.flatnonzero(
                    (parts.layers[:, kind] > 0) & (parts.recomputed[:, kind] == parts.layers[:, kind])
                )
                packs = np.flatnonzero(sizes.levels == level)
                running[np.ix_(packs, rows)] = sizes.table[packs] @ self._recomputing(parts[rows], kind).T
            most = np.maximum(most, _largest_in_flight(running, kept, in_flight, sizes))
        return waiting, most

    def _recomputing(self, parts: Parts, kind: int) -> Array:
        """Return coefficients of what a pack keeps while the last of the layers of a kind, all recomputed, runs again.

        Later layers have had their backward pass and are free.
        """
        inputs = (parts.recomputed[:, kind, None] - 1) * self._inputs[kind]
        recomputing: Array = self._of_packs(parts, kind) + inputs + self._alone[kind]
        return recomputing

    def _most(self, parts: Parts, layout: Layout, numbers: Ints | int, sizes: EpochSizes) -> tuple[Array, Array]:
        """Return (bytes while all packs in flight wait for their backward pass, most bytes), both [stages]."""
        in_flight = np.broadcast_to(np.minimum(layout.pipeline - numbers, sizes.epoch.micro_batches), len(parts))
        kept = self._of_packs(parts, len(KINDS))
        # Transient bytes are those of the layer that runs: the last one, as the backward pass begins.
        last = len(KINDS) - 1 - np.argmax(parts.layers[:, ::-1] > 0, axis=1)
        waiting = _largest(sizes, in_flight, kept) + _largest_alone(sizes, self._transient[last])
        most = waiting.copy()
        for kind in (VISION, LANGUAGE):  # only these are recomputed
            rows = np.flatnonzero((parts.layers[:, kind] > 0) & (parts.recomputed[:, kind] == parts.layers[:, kind]))
            if len(rows):
                # All layers of the kind are recomputed: had one been kept, it would have needed as much before.
                recomputing = self._recomputing(parts[rows], kind)
                others = _largest(sizes, in_flight[rows] - 1, kept[rows])
                most[rows] = np.maximum(most[rows], others + _largest_alone(sizes, recomputing))
        return waiting, most

    def _of_packs(self, parts: Parts, kinds: int) -> Array:
        """Return coefficients of the bytes that a pack keeps in layers of the first `kinds` kinds, [stages, 4]."""
        whole, inputs = self._split(parts, kinds)
        kept: Array = whole + inputs
        return kept

    def _split(self, parts: Parts, kinds: int) -> tuple[Array, Array]:
        """Return the same coefficients, of layers that are kept whole, and of inputs of those that are recomputed."""
        layers, recomputed = parts.layers[:, :kinds], parts.recomputed[:, :kinds]
        whole = layers - recomputed
        kept: Array = whole @ self._kept[:kinds] + (whole > 0) @ self._shared[:kinds]
        inputs: Array = recomputed @ self._inputs[:kinds]
        return kept, inputs

    def _static(self, parts: Parts, layout: Layout) -> Array:
        counts = (parts.layers @ of_layers for of_layers in (self._parameters, self._frozen))
        static: Array = stages_static_bytes(*counts, element_bytes=self._element_bytes, layout=layout)
        return self._static_factor * static


def _rows(coefficients: Iterable[tuple[float, ...]]) -> Array:
    """Return coefficients with a row for each kind of layer."""
    return np.array(list(coefficients))


def _heaviest(sizes: EpochSizes, in_flight: int, *coefficients: Array) -> tuple[float, ...]:
    """Return the bytes by each of the coefficients, [4] or [1, 4], of the packs whose sum of them is largest."""
    rows = np.vstack([np.atleast_2d(each) for each in coefficients])
    candidates = sizes.heaviest(in_flight)
    heaviest = candidates[np.argmax(candidates @ rows.sum(axis=0))]
    return tuple((rows @ heaviest).tolist())


def _largest(sizes: EpochSizes, in_flight: Ints, coefficients: Array) -> Array:
    """Return the largest cost of as many packs in flight, for each row of coefficients, [stages]."""
    largest = np.zeros(len(coefficients))
    order = np.argsort(in_flight, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(in_flight[order])) + 1):
        if len(rows) and (count := int(in_flight[rows[0]])):
            largest[rows] = (sizes.heaviest(count) @ coefficients[rows].T).max(axis=0)
    return largest


def _largest_in_flight(running: Array, kept: Array, in_flight: Ints, sizes: EpochSizes) -> Array:
    """Return the most bytes of a pack whose backward pass runs and those behind it that are in flight, [stages].

    `running` are the bytes of the first and `kept` those of the others, [packs, stages].
    """
    largest = np.zeros(kept.shape[1])
    for stage, count in enumerate(in_flight.tolist()):
        for block in sizes.blocks:
            before = np.cumsum(np.pad(kept[block, stage], ((0, 0), (1, 0), (0, 0))), axis=1)
            first = np.arange(block.shape[1])
            behind = before[:, np.minimum(first + count, block.shape[1])] - before[:, first + 1]
            largest[stage] = max(largest[stage], float((running[block, stage] + behind).max()))
    return largest


def _largest_alone(sizes: EpochSizes, coefficients: Array) -> Array:
    largest: Array = (sizes.heaviest(1) @ coefficients.T).max(axis=0)
    return largest
