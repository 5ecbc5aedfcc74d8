"""Pipeline stages as counts of layers, so that thousands of possible stages are computed at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autotune.prediction.costs import Array
from trials.data.records.sample import Ints
from trials.layer_costs import KINDS
from trials.model.cut import Cut

VISION, LANGUAGE = KINDS.index("vision"), KINDS.index("language")
"""Columns of the kinds of layers that can be recomputed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Layers of some stages, [stages, kinds] in the order of KINDS."""

    layers: Array
    recomputed: Array
    """Number of `layers`, the first ones, that are recomputed."""

    @classmethod
    def of(cls, cuts: Sequence[Cut]) -> "Parts":
        """Return the stages of one plan."""
        return cls(
            layers=np.array(
                [(c.embeds, len(c.vision), c.projects, len(c.language), c.heads) for c in cuts], dtype=np.float64
            ),
            recomputed=np.array([(0, c.recompute_vision, 0, c.recompute_language, 0) for c in cuts], dtype=np.float64),
        )

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, stages: slice | Ints) -> "Parts":
        return Parts(layers=self.layers[stages], recomputed=self.recomputed[stages])
