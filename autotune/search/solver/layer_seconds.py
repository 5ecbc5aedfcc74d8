"""Seconds of one layer of each kind for the mean pack, of which the closed form makes those of stages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.prediction.parts import LANGUAGE, VISION, Parts
from autotune.prediction.predictor import Predictor
from autotune.prediction.sizes import EpochSizes
from autotune.search.solver.rungs import Rungs
from trials.arrays import Floats
from trials.costs.coefficients import KINDS
from trials.plan import Layout

_EACH_LAYER = Parts.of_layers(*(np.eye(3 * len(KINDS), len(KINDS), k=-place * len(KINDS)) for place in range(3)))
"""A layer of each kind alone, then only what recomputing one adds, and then what doing so selectively adds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerSeconds:
    """Seconds of the mean pack by kind of layer, in the order of KINDS."""

    kept: Floats
    """Forward and backward."""
    recomputed: Floats
    """Seconds that recomputing the layer adds."""
    selective: Floats
    """Seconds that recomputing the layer selectively adds."""

    def of(self, parts: Parts) -> Floats:
        """Return the seconds of each stage, [stages]."""
        seconds: Floats = (
            parts.layers @ self.kept + parts.recomputed @ self.recomputed + parts.selective @ self.selective
        )
        return seconds

    def of_rungs(self, rungs: Rungs) -> Floats:
        """Return the seconds that the first rung of (vision, language) layers adds, then the later one, [4].

        A kind with one rung has the same seconds for both.
        """
        both, two = [VISION, LANGUAGE], np.array(rungs) > 1
        whole, selective = self.recomputed[both], self.selective[both]
        return np.concatenate([np.where(two, selective, whole), np.where(two, np.maximum(whole - selective, 0), whole)])


def layer_seconds(predictor: Predictor, layout: Layout, sizes: EpochSizes, everything: Parts) -> LayerSeconds:
    """Return the seconds of layers of each kind for the mean pack; a stage takes the sum over its layers.

    `everything` is the whole chain as one stage. With ZeRO 2 and 3 a layer hides exchanges of its neighbours, so its
    seconds are what it adds to the chain.
    """
    kept, recomputed, selective = _mean_seconds(predictor, _EACH_LAYER, layout, sizes).reshape(3, len(KINDS))
    if layout.shards_gradients:
        (whole,) = _mean_seconds(predictor, everything, layout, sizes)
        kept = kept * (whole / (everything.layers @ kept))
        for kind in (VISION, LANGUAGE):
            layers = everything.layers * (np.arange(len(KINDS)) == kind)
            for added, name in ((recomputed, "recomputed"), (selective, "selective")):
                (seconds,) = _mean_seconds(predictor, replace(everything, **{name: layers}), layout, sizes)
                added[kind] = max(seconds - whole, 0.0) / max(layers.sum(), 1)
    return LayerSeconds(kept=kept, recomputed=recomputed, selective=selective)


def least_seconds(predictor: Predictor, layout: Layout, sizes: EpochSizes, everything: Parts) -> float:
    """Return the seconds of the whole chain for the mean pack where no weights are gathered twice (ZeRO 3)."""
    once = replace(everything, gathered_once=everything.layers * np.isin(np.arange(len(KINDS)), (VISION, LANGUAGE)))
    return float(_mean_seconds(predictor, once, layout, sizes)[0])


def _mean_seconds(predictor: Predictor, parts: Parts, layout: Layout, sizes: EpochSizes) -> Floats:
    """Return the seconds of both passes of the mean pack, with loading and exchanges, [stages]."""
    mean, whole = sizes.mean, sizes.whole.mean(axis=0, keepdims=True)
    forward, backward = predictor.times.pass_seconds(parts, layout, mean)
    exchange, exchange_back = predictor.times.exchange_seconds(parts, layout, mean, np.array([sizes.degree]))
    seconds = predictor.times.load_seconds(parts, whole) + forward + backward + exchange + exchange_back
    of_stages: Floats = seconds[0]
    return of_stages


def mean_seconds(levels: Sequence[LayerSeconds], shares: Sequence[float]) -> LayerSeconds:
    """Return the seconds of the mean row, with these shares of the rows of the epoch for each level."""
    kept, recomputed, selective = (
        np.sum([share * getattr(level, side) for level, share in zip(levels, shares, strict=True)], axis=0)
        for side in ("kept", "recomputed", "selective")
    )
    return LayerSeconds(kept=kept, recomputed=recomputed, selective=selective)
