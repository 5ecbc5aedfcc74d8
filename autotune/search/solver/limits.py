"""Constraints on every plan of a search."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.prediction.memory import StageBytes
from trials.workload import Workload

# A choice: with less, plans at the limit run out of memory in trials; with more, layers are recomputed for nothing.
HEADROOM = 0.97
"""Share of the memory that solved plans may use, since predictions err by a few per cent."""
# A choice: rounding may double it, and half of the memory is left for the rest.
_HOST_SHARE = 0.25
"""Share of the host's memory for what layers offload: torch rounds each page-locked block up to a power of two, and
ranks, loading processes and files need memory as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The model's layers, which are split into stages, and the memory of each rank."""

    vision_layers: int
    language_layers: int
    memory_limit_bytes: int
    """Per rank."""
    host_limit_bytes: float = math.inf
    """Most bytes that a rank may offload to the host's memory."""
    usable_share: float = HEADROOM
    """Share of the memory limit that a solved plan may use."""

    @classmethod
    def of(cls, workload: Workload, groups: int = 1) -> "Limits":
        """Return the limits of a workload, with `groups` groups of ranks on the devices at the same time."""
        model = workload.model
        return cls(
            vision_layers=model.vision_layers,
            language_layers=model.language_layers,
            memory_limit_bytes=workload.memory_limit_bytes,
            host_limit_bytes=_HOST_SHARE * workload.hardware.ram_bytes / (workload.hardware.of_node * groups),
        )

    @property
    def layers(self) -> int:
        return self.vision_layers + self.language_layers

    @property
    def usable_bytes(self) -> float:
        """Most bytes that a solved plan may be predicted to use."""
        return self.memory_limit_bytes * self.usable_share

    def first_above(self, memory: Sequence[StageBytes]) -> int | None:
        """Return the first stage whose interval is entirely above the memory, or that offloads too much; or None."""
        return next(
            (
                number
                for number, stage in enumerate(memory)
                if stage.low > self.memory_limit_bytes or stage.host > self.host_limit_bytes
            ),
            None,
        )
