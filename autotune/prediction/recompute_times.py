"""Seconds that layers take to free memory: to compute again what they do not keep, or to wait until it is copied."""

import numpy as np

from autotune.prediction.columns import in_columns
from autotune.prediction.parts import Parts
from trials.arrays import Floats
from trials.costs.coefficients import KINDS
from trials.costs.layer_costs import LayerCosts
from trials.plan import Layout
from trials.stage import TOWERS


def offloaded_kinds(layout: Layout) -> list[int]:
    """Return the kinds of layers that offload, by their place in KINDS; under other plans they recompute."""
    return [KINDS.index(tower) for tower in TOWERS if layout.offloads(tower)]


class RecomputeTimes:
    """Seconds that freeing the memory of layers adds to the passes of stages."""

    def __init__(self, costs: LayerCosts) -> None:
        layers = [costs[kind] for kind in KINDS]
        self._again = in_columns(layer.recompute_seconds for layer in layers)
        self._selectively = in_columns(layer.selective_seconds for layer in layers)
        self._kept = in_columns(layer.kept_bytes for layer in layers)
        self._passes = (
            in_columns(layer.forward_seconds for layer in layers),
            in_columns(layer.backward_seconds for layer in layers),
        )
        copy = costs.exchange("copy")
        self._per_byte = copy.seconds_per_byte if copy else (0.0, 0.0)

    def seconds(self, parts: Parts, sizes: Floats, curves: Floats, layout: Layout) -> Floats:
        """Return the seconds [packs, stages] of packs of `sizes` [packs, 5], with `curves` [packs, kinds] at these."""
        selective: Floats = curves * (sizes @ self._selectively.T)
        return self.of_layers(sizes, curves, layout) @ parts.recomputed.T + selective @ parts.selective.T

    def of_layers(self, sizes: Floats, curves: Floats, layout: Layout) -> Floats:
        """Return the seconds of recomputing a whole layer of each kind, or of offloading what it keeps, [packs, kinds].

        What a layer offloads is copied to the host while the next such layer runs forward, and back while the one after
        it runs backward. Packs wait where a copy takes longer than the pass of such a layer.
        """
        seconds: Floats = curves * (sizes @ self._again.T)
        if kinds := offloaded_kinds(layout):
            copied = sizes @ self._kept[kinds].T
            seconds[:, kinds] = np.sum(
                [
                    np.maximum(0, per_byte * copied - curves[:, kinds] * (sizes @ passes[kinds].T))
                    for per_byte, passes in zip(self._per_byte, self._passes, strict=True)
                ],
                axis=0,
            )
        return seconds
