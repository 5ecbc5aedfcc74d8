"""Bytes that packs keep on pipeline stages, as coefficients of their sizes."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autotune.dimensions.folds import exchanges
from autotune.dimensions.zero import gathered_parameters
from autotune.prediction.columns import CONSTANT, EVERY, in_columns
from autotune.prediction.freeing import offloaded_kinds
from autotune.prediction.parts import LANGUAGE, VISION, Parts
from trials.arrays import Floats, Ints
from trials.costs.coefficients import KINDS
from trials.costs.layer_costs import LayerCosts
from trials.engine.static_memory import buffer_bytes
from trials.plan import Layout

_NO_STAGES: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerBytes:
    """Coefficients of the bytes of each kind of layer, for packs of one sequence and tensor degree, [kinds, 5]."""

    kept: Floats
    shared: Floats
    transient: Floats
    inputs: Floats
    """Bytes of the inputs, which are all that layers keep that are recomputed."""
    offloaded: NDArray[np.bool_]
    """Whether layers of each kind offload instead of being recomputed, [kinds]."""

    @classmethod
    def of(cls, costs: LayerCosts, degree: int, layout: Layout, factor: float, element_bytes: int) -> "LayerBytes":
        """Return the profiled bytes times a factor: all ranks that compute a pack divide it as if they shared it.

        With ZeRO 3, weights of `element_bytes` that are gathered are transient; so is the buffer for gradients.
        """
        of_kinds = {kind: costs[kind] for kind in KINDS}
        # A meter that counts what is transient counts the buffers of the engine too.
        is_counted = any(any(layer.transient_bytes) for layer in of_kinds.values())
        for each in exchanges(costs, layout, degree):
            if each.layer is not None:
                of_kinds[each.layer] = each.held(of_kinds[each.layer])
        layers = list(of_kinds.values())
        of_engine = np.zeros((len(KINDS), len(EVERY)))
        of_engine[:, CONSTANT] = element_bytes * np.array(gathered_parameters(costs, layout))
        of_engine[:, CONSTANT] += is_counted * buffer_bytes(layout, element_bytes)
        offloaded = np.isin(range(len(KINDS)), offloaded_kinds(layout))
        return cls(
            kept=factor * in_columns(layer.kept_bytes for layer in layers),
            shared=factor * in_columns(layer.shared_bytes for layer in layers),
            transient=factor * in_columns(layer.transient_bytes for layer in layers) + of_engine,
            inputs=factor * in_columns(layer.recomputed_bytes for layer in layers),
            offloaded=offloaded,
        )

    @cached_property
    def columns(self) -> tuple[int, ...]:
        """Columns of sizes on which the bytes depend, and the constant one; seldom that of squared lengths."""
        every = np.concatenate([self.kept, self.shared, self.transient, self.inputs])
        return tuple(column for column in EVERY if column == CONSTANT or every[:, column].any())

    def of_packs(self, parts: Parts, kinds: int) -> Floats:
        """Return the bytes that a pack keeps in layers of the first `kinds` kinds, [stages, 5]."""
        whole, inputs = self.split(parts, kinds)
        kept: Floats = whole + inputs
        return kept

    def split(self, parts: Parts, kinds: int) -> tuple[Floats, Floats]:
        """Return the same for layers that are kept whole, and for inputs of those that are recomputed.

        Of those that offload, only the input of the first stays: other stages or layers hold it as well.
        """
        layers, recomputed = parts.layers[:, :kinds], parts.recomputed[:, :kinds]
        whole = layers - recomputed
        kept: Floats = whole @ self.kept[:kinds] + (whole > 0) @ self.shared[:kinds]
        inputs: Floats = np.where(self.offloaded[:kinds], recomputed > 0, recomputed) @ self.inputs[:kinds]
        return kept, inputs

    def freed(self) -> Floats:
        """Return the most that a layer of each kind frees that is recomputed or offloads, [kinds, 5]."""
        freed: Floats = np.maximum(self.kept - ~self.offloaded[:, None] * self.inputs, 0)
        return freed

    def beginning(self, parts: Parts) -> Floats:
        """Return the transient bytes as the backward pass of a pack begins: those of the last layer, [stages, 5]."""
        last = len(KINDS) - 1 - np.argmax(parts.layers[:, ::-1] > 0, axis=1)
        transient: Floats = self.transient[last] + self._on_their_way(parts, len(KINDS))
        return transient

    def on_host(self, parts: Parts) -> Floats:
        """Return the bytes that a pack keeps in the host's memory, [stages, 5]."""
        kept: Floats = (self.offloaded * parts.recomputed) @ self.kept
        return kept

    def _on_their_way(self, parts: Parts, kinds: int) -> Floats:
        """Return the bytes on the device of layers that offload: at most two, the last of the first kinds, [stages, 5].

        As one runs, what the one before it keeps is copied.
        """
        away: NDArray[np.bool_] = np.logical_and(parts.recomputed[:, :kinds], self.offloaded[:kinds])
        last = kinds - 1 - np.argmax(away[:, ::-1], axis=1)
        bytes_of_two: Floats = away.max(axis=1, keepdims=True) * (2 * self.kept + self.shared)[last]
        return bytes_of_two

    @cached_property
    def _has_transient(self) -> list[bool]:
        return [bool(of_kind.any()) for of_kind in self.transient]

    def needs_most_at(self, parts: Parts, kind: int) -> Ints:
        """Return the stages that may need most at the last layer of a kind, and not as the backward pass begins."""
        if self._has_transient[kind] or self.offloaded[kind]:
            return np.flatnonzero(parts.layers[:, kind])
        return np.flatnonzero(recomputes_all(parts, kind)) if kind in (VISION, LANGUAGE) else _NO_STAGES

    def running(self, parts: Parts, kind: int) -> tuple[Floats, Floats, Floats]:
        """Return what a pack keeps during the backward pass of the last layer of a kind, [stages, 5] each.

        The parts are those of `PeakParts` but the static one. Later layers have had their backward pass and are free.
        Where all layers of the kind are recomputed, the last of them runs again.
        """
        kept, inputs = self.split(parts, kind + 1)
        before, inputs_before = self.split(parts, kind)
        # The layer that runs again keeps all of its activations, the other recomputed ones their inputs.
        others = (parts.recomputed[:, kind, None] - 1) * self.inputs[kind]
        again = inputs_before + others + self.kept[kind] + self.shared[kind]
        recomputed = recomputes_all(parts, kind)[:, None] & ~self.offloaded[kind]
        transient = np.broadcast_to(self.transient[kind], kept.shape) + self._on_their_way(parts, kind + 1)
        return np.where(recomputed, before, kept), np.where(recomputed, again, inputs), transient


def recomputes_all(parts: Parts, kind: int) -> NDArray[np.bool_]:
    """Return which stages recompute all layers of a kind, of which they have some, [stages].

    Had one been kept, it would have needed as much before.
    """
    every: NDArray[np.bool_] = (parts.layers[:, kind] > 0) & (parts.recomputed[:, kind] == parts.layers[:, kind])
    return every
