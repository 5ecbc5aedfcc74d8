"""What every plan of a search has to keep to."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.predict.memory import StageBytes

HEADROOM = 0.97
"""Predictions err by a few per cent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The model's layers, which the stages share out, and the memory of each rank."""

    vision_layers: int
    language_layers: int
    memory_bytes: int
    """Per rank."""

    @property
    def layers(self) -> int:
        return self.vision_layers + self.language_layers

    @property
    def usable_bytes(self) -> float:
        """What a solved plan may be predicted to use."""
        return self.memory_bytes * HEADROOM

    def first_above(self, memory: Sequence[StageBytes]) -> int | None:
        """The first stage that needs more than the memory even if all errors are in its favour."""
        return next((number for number, stage in enumerate(memory) if stage.low > self.memory_bytes), None)
