"""Bytes that packs keep on pipeline stages, as coefficients of their sizes."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.costs import Array
from autotune.prediction.parts import Parts
from trials.layer_costs import KINDS, LayerCosts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerBytes:
    """Coefficients of the bytes of each kind of layer, for packs of one sequence and tensor degree, [kinds, 4]."""

    kept: Array
    shared: Array
    transient: Array
    inputs: Array
    """Of layers that are recomputed."""

    @classmethod
    def of(cls, costs: LayerCosts, degree: int, tensor: int, factor: float) -> "LayerBytes":
        """Return the profiled bytes times a factor: all ranks that compute a pack divide it as if they shared it."""
        layers = [costs[kind] for kind in KINDS]
        if degree * tensor > 1:
            of_ranks, language = costs.shared_by(degree * tensor), KINDS.index("language")
            units, tokens, squares, constant = of_ranks.shared_bytes
            layers[language] = replace(
                layers[language],
                kept_bytes=of_ranks.kept_bytes,
                # Rotary embeddings are those of all tokens that the tensor ranks gather.
                shared_bytes=(units, tokens * tensor, squares, constant),
                transient_bytes=of_ranks.transient_bytes,
            )
        return cls(
            kept=factor * np.array([layer.kept_bytes for layer in layers]),
            shared=factor * np.array([layer.shared_bytes for layer in layers]),
            transient=factor * np.array([layer.transient_bytes for layer in layers]),
            inputs=factor * np.array([layer.recomputed_bytes for layer in layers]),
        )

    def of_packs(self, parts: Parts, kinds: int) -> Array:
        """Return what a pack keeps in layers of the first `kinds` kinds, [stages, 4]."""
        whole, inputs = self.split(parts, kinds)
        kept: Array = whole + inputs
        return kept

    def split(self, parts: Parts, kinds: int) -> tuple[Array, Array]:
        """Return the same for layers that are kept whole, and for inputs of those that are recomputed."""
        layers, recomputed = parts.layers[:, :kinds], parts.recomputed[:, :kinds]
        whole = layers - recomputed
        kept: Array = whole @ self.kept[:kinds] + (whole > 0) @ self.shared[:kinds]
        inputs: Array = recomputed @ self.inputs[:kinds]
        return kept, inputs

    def beginning(self, parts: Parts) -> Array:
        """Return the transient bytes as the backward pass of a pack begins: those of the last layer, [stages, 4]."""
        last = len(KINDS) - 1 - np.argmax(parts.layers[:, ::-1] > 0, axis=1)
        transient: Array = self.transient[last]
        return transient

    def recomputing(self, parts: Parts, kind: int) -> Array:
        """Return what a pack keeps while the last of the layers of a kind, all recomputed, runs again, [stages, 4].

        Later layers have had their backward pass and are free.
        """
        inputs = (parts.recomputed[:, kind, None] - 1) * self.inputs[kind]
        alone = self.kept[kind] + self.shared[kind] + self.transient[kind]
        recomputing: Array = self.of_packs(parts, kind) + inputs + alone
        return recomputing

    def recomputing_parts(self, part: Parts, kind: int) -> tuple[Array, Array, Array]:
        """Return the same for one stage in the parts of `PeakParts` but the static one, [1, 4] each."""
        kept, inputs = self.split(part, kind)
        again = inputs + (part.recomputed[:, kind, None] - 1) * self.inputs[kind] + self.kept[kind] + self.shared[kind]
        return kept, again, self.transient[kind][None]


def recomputes_all(parts: Parts, kind: int) -> NDArray[np.bool_]:
    """Return which stages recompute all layers of a kind, of which they have some, [stages].

    Had one been kept, it would have needed as much before.
    """
    every: NDArray[np.bool_] = (parts.layers[:, kind] > 0) & (parts.recomputed[:, kind] == parts.layers[:, kind])
    return every
