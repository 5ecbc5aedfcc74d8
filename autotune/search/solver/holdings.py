"""What a pipeline stage can hold: contiguous parts of the chain, and those of them that are alike."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autotune.predict.parts import LANGUAGE, VISION, Parts
from trials.data.records.sample import Ints
from trials.layer_costs import KINDS

_EMBEDDING, _PROJECTOR, _HEAD = (KINDS.index(kind) for kind in ("vision_embedding", "projector", "head"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holdings:
    """Parts of the chain as one stage of the pipeline, all [parts]."""

    vision: Ints
    language: Ints
    projects: NDArray[np.bool_]
    """Whether the projector is among them."""
    embeds: bool
    heads: bool

    @classmethod
    def of(cls, starts: Ints, ends: Ints, vision_layers: int, *, embeds: bool, heads: bool) -> "Holdings":
        """Layers starts[i] to ends[i] of the chain, vision layers first."""
        vision = np.minimum(ends, vision_layers) - np.minimum(starts, vision_layers)
        return cls(
            vision=vision,
            language=ends - starts - vision,
            projects=(starts < vision_layers) & (vision_layers <= ends),
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
        """Without those that are alike; the row of each of them here; and for each row here, which of them it is.

        In a chain of equal layers most parts are: what counts is how many layers of each kind they hold.
        """
        most = int(self.language.max(initial=0)) + 1
        _, first, which = np.unique(
            (self.vision * most + self.language) * 2 + self.projects, return_index=True, return_inverse=True
        )
        return self[first], first, which

    def parts(self, recompute_vision: Ints, recompute_language: Ints) -> Parts:
        """With so many of each one's layers recomputed."""
        layers, recomputed = np.zeros((2, len(self), len(KINDS)))
        layers[:, _EMBEDDING], layers[:, _HEAD] = self.embeds, self.heads
        layers[:, VISION], layers[:, _PROJECTOR], layers[:, LANGUAGE] = self.vision, self.projects, self.language
        recomputed[:, VISION], recomputed[:, LANGUAGE] = recompute_vision, recompute_language
        return Parts(layers=layers, recomputed=recomputed)
