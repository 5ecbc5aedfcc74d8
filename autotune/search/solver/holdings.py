"""Contiguous parts of the chain that a pipeline stage can hold, and which of them are alike."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.parts import LANGUAGE, VISION, Parts
from trials.data.records.sample import Ints
from trials.layer_costs import KINDS

_EMBEDDING, _PROJECTOR, _HEAD = (KINDS.index(kind) for kind in ("vision_embedding", "projector", "head"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holdings:
    """Parts of the chain as one stage of the pipeline, all [parts]."""

    vision: Ints
    language: Ints
    projects: NDArray[np.bool_]
    """Whether the part includes the projector."""
    embeds: bool
    heads: bool

    @classmethod
    def of(cls, starts: Ints, ends: Ints, vision_layers: int, *, embeds: bool, heads: bool) -> "Holdings":
        """Build the parts with layers starts[i] to ends[i] of the chain, in which vision layers come first."""
        vision = np.minimum(ends, vision_layers) - np.minimum(starts, vision_layers)
        # With the last vision layer, or the first language layer where there is none.
        projecting = max(vision_layers - 1, 0)
        return cls(
            vision=vision,
            language=ends - starts - vision,
            projects=(starts <= projecting) & (projecting < ends),
            embeds=embeds,
            heads=heads,
        )

    def __len__(self) -> int:
        return len(self.vision)

    def __getitem__(self, rows: Ints) -> "Holdings":
        return Holdings(
            vision=self.vision[rows],
            language=self.language[rows],
            projects=self.projects[rows],
            embeds=self.embeds,
            heads=self.heads,
        )

    def distinct(self) -> tuple["Holdings", Ints, Ints]:
        """Return (distinct parts, the row of each of them here, the distinct part of each row here).

        Many parts of a chain of equal layers are alike: only the numbers of layers of each kind count.
        """
        most = int(self.language.max(initial=0)) + 1
        _, first, which = np.unique(
            (self.vision * most + self.language) * 2 + self.projects, return_index=True, return_inverse=True
        )
        return self[first], first, which

    def parts(self, recompute_vision: Ints, recompute_language: Ints) -> Parts:
        """Return the parts with these numbers of layers recomputed."""
        layers, recomputed = np.zeros((2, len(self), len(KINDS)))
        layers[:, _EMBEDDING], layers[:, _HEAD] = self.embeds, self.heads
        layers[:, VISION], layers[:, _PROJECTOR], layers[:, LANGUAGE] = self.vision, self.projects, self.language
        recomputed[:, VISION], recomputed[:, LANGUAGE] = recompute_vision, recompute_language
        return Parts(layers=layers, recomputed=recomputed)
