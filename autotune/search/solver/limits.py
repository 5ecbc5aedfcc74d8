"""Constraints on every plan of a search."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.prediction.memory import StageBytes
from trials.workload import Workload

HEADROOM = 0.97
"""Share of the memory that solved plans may use, since predictions err by a few per cent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The model's layers, which are split into stages, and the memory of each rank."""

    vision_layers: int
    language_layers: int
    memory_limit_bytes: int
    """Per rank."""

    @classmethod
    def of(cls, workload: Workload) -> "Limits":
        model = workload.model
        return cls(
            vision_layers=model.vision_layers,
            language_layers=model.language_layers,
            memory_limit_bytes=workload.memory_limit_bytes,
        )

    @property
    def layers(self) -> int:
        return self.vision_layers + self.language_layers

    @property
    def usable_bytes(self) -> float:
        """Most bytes that a solved plan may be predicted to use."""
        return self.memory_limit_bytes * HEADROOM

    def first_above(self, memory: Sequence[StageBytes]) -> int | None:
        """Return the first stage whose interval is entirely above the memory; None when each may fit."""
        return next((number for number, stage in enumerate(memory) if stage.low > self.memory_limit_bytes), None)
