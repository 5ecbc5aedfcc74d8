"""Bytes that packs keep on pipeline stages, as coefficients of their sizes."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from autotune.dimensions.folds import exchanges
from autotune.dimensions.zero import gathered_weights, whole_gradients, whole_weights
from autotune.prediction.columns import CONSTANT, EVERY, in_columns
from autotune.prediction.parts import HEAD, LANGUAGE, VISION, Parts
from autotune.prediction.recompute_times import offloaded_kinds
from trials.arrays import Bools, Floats, Ints
from trials.costs.coefficients import KINDS
from trials.costs.layer_costs import LayerCosts
from trials.engine.static_memory import GRADIENT_BYTES, buffer_bytes
from trials.plan import Layout

Place: TypeAlias = tuple[int, bool]
"""The last layer of a kind in a backward pass, or the last one of it that is recomputed selectively."""
PLACES: tuple[Place, ...] = (*((kind, False) for kind in range(len(KINDS))), (VISION, True), (LANGUAGE, True))


class Moment(NamedTuple):
    """The backward pass of the layer at a place, which comes when no more of its kind are left than these."""

    place: Place
    whole: float = math.inf
    """Layers that are kept whole."""
    selective: float = math.inf
    """Layers that are recomputed selectively."""

    def left(self, parts: Parts) -> Parts:
        """Return the stages without the layers of the kind that have had their backward pass before."""
        kind, _ = self.place
        layers, selective = parts.layers.copy(), parts.selective.copy()
        whole = layers[:, kind] - parts.recomputed[:, kind] - selective[:, kind]
        selective[:, kind] = np.minimum(selective[:, kind], self.selective)
        layers[:, kind] = parts.recomputed[:, kind] + selective[:, kind] + np.minimum(whole, self.whole)
        return replace(parts, layers=layers, selective=selective)


MOMENTS = tuple(Moment(place) for place in PLACES)
"""When a pack may need most whose backward pass leaves nothing."""
DEFERRING_MOMENTS = (
    *(Moment((kind, False)) for kind in range(len(KINDS))),
    *(
        moment
        for tower in (VISION, LANGUAGE)
        for moment in (Moment((tower, False), 1), Moment((tower, True), 0), Moment((tower, False), 0, 0))
    ),
)
"""When it may need most if layers that are kept whole leave deferred weight gradients, which may be more than they
kept: bytes change linearly along alike layers, so at the first or the last of them, and of the others at the first."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerBytes:
    """Coefficients of the bytes of each kind of layer, for packs of one sequence and tensor degree, [kinds, 5]."""

    kept: Floats
    shared: Floats
    transient: Floats
    inputs: Floats
    """Bytes of the inputs, which are all that layers keep that are recomputed."""
    selective: Floats
    """Bytes that layers keep that are recomputed selectively."""
    peak: Floats
    """Most bytes of such a layer, with those that are shared, during its backward pass."""
    weights: Floats
    """Bytes that layers keep until their deferred weight gradients are computed; 0 with 1F1B."""
    gathered: Floats
    """Bytes of the weights of a layer that stay gathered for its backward pass; 0 but with ZeRO 3."""
    offloaded: NDArray[np.bool_]
    """Whether layers of each kind offload instead of being recomputed, [kinds]."""

    @classmethod
    def of(
        cls, costs: LayerCosts, degree: int, layout: Layout, factor: float | Floats, element_bytes: int
    ) -> "LayerBytes":
        """Return the profiled bytes times a factor, or times one of each kind [kinds, 1].

        All ranks that compute a pack divide it as if they shared it. Where ranks hold weights of `element_bytes` or
        gradients in shards, those that are whole are transient; so is DeepSpeed's buffer for gradients.
        """
        of_kinds = {kind: costs[kind] for kind in KINDS}
        # A meter that counts what is transient counts the buffers of the engine too.
        is_counted = any(any(layer.transient_bytes) for layer in of_kinds.values())
        for each in exchanges(costs, layout, degree):
            if each.layer is not None:
                of_kinds[each.layer] = each.held(of_kinds[each.layer])
        layers = list(of_kinds.values())
        kept, shared = (
            factor * in_columns(of_layers)
            for of_layers in ((layer.kept_bytes for layer in layers), (layer.shared_bytes for layer in layers))
        )
        # Where ranks exchange, layers keep the same shares as alone.
        alone = [costs[kind] for kind in KINDS]
        shares = in_columns(layer.selective_bytes for layer in alone), in_columns(layer.kept_bytes for layer in alone)
        selective = kept * np.minimum(np.divide(*shares, out=np.zeros_like(kept), where=shares[1] > 0), 1)
        peak = factor * in_columns(layer.selective_peak_bytes for layer in layers)
        of_engine = np.zeros((len(KINDS), len(EVERY)))
        of_engine[:, CONSTANT] = element_bytes * np.array(whole_weights(costs, layout))
        of_engine[:, CONSTANT] += GRADIENT_BYTES * np.array(whole_gradients(costs, layout))
        of_engine[:, CONSTANT] += is_counted * buffer_bytes(layout, element_bytes)
        gathered = np.zeros_like(of_engine)
        gathered[:, CONSTANT] = element_bytes * np.array(gathered_weights(costs, layout))
        offloaded = np.isin(range(len(KINDS)), offloaded_kinds(layout))
        return cls(
            kept=kept,
            shared=shared,
            transient=factor * in_columns(layer.transient_bytes for layer in layers) + of_engine,
            inputs=factor * in_columns(layer.recomputed_bytes for layer in layers),
            selective=selective,
            # The solver relies on it that a further rung never needs more memory. That holds where what a selective
            # layer keeps and its peak add up to at least what a whole layer keeps, as in all measured layers.
            weights=layout.zero_bubble * factor * in_columns(layer.weight_bytes for layer in alone),
            peak=np.clip(peak, np.maximum(selective, kept + shared - selective), kept + shared),
            gathered=gathered,
            offloaded=offloaded,
        )

    def of_packs(self, parts: Parts, kinds: int) -> Floats:
        """Return the bytes that a pack keeps in layers of the first `kinds` kinds, [stages, 5]."""
        whole, inputs = self.split(parts, kinds)
        kept: Floats = whole + inputs
        return kept

    def split(self, parts: Parts, kinds: int) -> tuple[Floats, Floats]:
        """Return the same for layers that are not recomputed as a whole, and for inputs of those that are.

        Of those that offload, only the input of the first stays: other stages or layers hold it as well.
        """
        layers, recomputed, selective = (each[:, :kinds] for each in (parts.layers, parts.recomputed, parts.selective))
        whole = layers - recomputed - selective
        kept: Floats = (
            whole @ self.kept[:kinds]
            + selective @ self.selective[:kinds]
            + (whole + selective > 0) @ self.shared[:kinds]
        )
        inputs: Floats = np.where(self.offloaded[:kinds], recomputed > 0, recomputed) @ self.inputs[:kinds]
        return kept, inputs

    def freed(self, rungs: tuple[int, int]) -> Floats:
        """Return the most that the first of the `rungs` of (vision, language) layers frees, then the later one, [4, 5].

        Layers with one rung are recomputed or offload; with two they are recomputed selectively first, and then as a
        whole. A kind with one rung has the same bytes for both.
        """
        both, two = [VISION, LANGUAGE], np.array(rungs)[:, None] > 1
        kept, selective, left = (
            each[both] for each in (self.kept, self.selective, ~self.offloaded[:, None] * self.inputs)
        )
        whole = np.maximum(kept - left, 0)
        first, later = np.where(two, kept - selective, whole), np.where(two, np.maximum(selective - left, 0), whole)
        freed: Floats = np.concatenate([first, later])
        return freed

    def deferred(self, parts: Parts, kinds: int = len(KINDS)) -> Floats:
        """Return the bytes that a pack keeps after the backward passes of layers of the first `kinds` kinds.

        Layers defer their weight gradients that keep everything, [stages, 5].
        """
        kept = (parts.layers - parts.recomputed - parts.selective)[:, :kinds]
        deferred: Floats = kept @ self.weights[:kinds]
        return deferred

    def beginning(self, parts: Parts) -> Floats:
        """Return the transient bytes as the backward pass of a pack begins: those of the last layer, [stages, 5]."""
        last = len(KINDS) - 1 - np.argmax(parts.layers[:, ::-1] > 0, axis=1)
        transient: Floats = self.transient[last] + self._on_their_way(parts, len(KINDS))
        return transient + self._staying(parts, HEAD)

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

    def needs_most_at(self, parts: Parts, place: Place) -> Ints:
        """Return the stages that may need most at this place, and not as the backward pass begins."""
        kind, is_selective = place
        if not is_selective and (self._has_transient[kind] or self.offloaded[kind]):
            return np.flatnonzero(parts.layers[:, kind])
        return np.flatnonzero(_frees_all(parts, place))

    def running(self, parts: Parts, place: Place) -> tuple[Floats, Floats, Floats]:
        """Return what a pack keeps during the backward pass of the layer at this place, [stages, 5] each.

        The parts are those of `PeakParts` but the static one. Later layers have had their backward pass and are free.
        Where no layer of the kind is kept whole, this one is recomputed, as a whole or selectively.
        """
        kind, is_selective = place
        kept, inputs = self.split(parts, kind + 1)
        again = _frees_all(parts, place)[:, None] & ~self.offloaded[kind]
        if is_selective:
            inputs = inputs + again * (self.peak[kind] - self.selective[kind] - self.shared[kind])
        else:
            before, inputs_before = self.split(parts, kind)
            # The layer that runs again keeps all of its activations, the other recomputed ones their inputs.
            others = (parts.recomputed[:, kind, None] - 1) * self.inputs[kind]
            kept = np.where(again, before, kept)
            inputs = np.where(again, inputs_before + others + self.kept[kind] + self.shared[kind], inputs)
        transient = np.broadcast_to(self.transient[kind], kept.shape) + self._on_their_way(parts, kind + 1)
        return kept, inputs, transient + self._staying(parts, kind)

    def _staying(self, parts: Parts, kind: int) -> Floats:
        """Return the bytes of weights that stay gathered as the last layer of a kind runs backward, [stages, 5].

        Those of this layer and of the one before it are not among them: they are transient, whether they stay or not.
        """
        layers = parts.gathered_once[:, : kind + 1].copy()
        if kind in (VISION, LANGUAGE):
            layers[:, kind] -= 2
        elif kind == HEAD:
            layers[:, LANGUAGE] -= 1
        staying: Floats = np.maximum(layers, 0) @ self.gathered[: kind + 1]
        return staying


def _frees_all(parts: Parts, place: Place) -> Bools:
    """Return which stages keep no layer of a kind whole, and recompute some as this place says, [stages].

    Had one been kept, it would have needed as much before.
    """
    kind, is_selective = place
    whole, selective = parts.recomputed[:, kind], parts.selective[:, kind]
    frees: Bools = ((selective if is_selective else whole) > 0) & (whole + selective == parts.layers[:, kind])
    return frees
