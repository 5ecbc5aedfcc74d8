"""The speed of a full training, by window of steps."""

import math
from dataclasses import dataclass

from trials.tasks.training.spread import Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A part of a step that takes longer than it did."""

    part: str
    """Name of the part: loading, a stage, a rank, all ranks, or communication."""
    usual_seconds: float
    """Usual seconds of the part in a step."""
    seconds: float
    """Present seconds of the part in a step."""

    def __str__(self) -> str:
        return f"{self.part}: {self.seconds:.3g} s a step instead of {self.usual_seconds:.3g} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Where the time of a step went, in seconds: means over the steps of a window."""

    loads: Spread
    """Waiting for packs, of all ranks."""
    passes: tuple[Spread, ...]
    """Forward and backward passes, of the ranks of each stage."""
    other_seconds: float
    """The rest of a step on the busiest rank: communication and the update."""
    growth: Growth | None
    """What grew most since the plan was promised; None in a window that is not slow, and where that is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchWindow:
    """The speed of consecutive steps of a launch. Self-contained, so that it can wait on disk for its database."""

    launch_id: str
    first_step: int
    """Total optimizer steps, this one included."""
    last_step: int
    step_seconds: float
    """Median."""
    training_samples_per_second: float
    tokens_per_second: float
    promised_samples_per_second: float | None
    """Speed by the search, for samples of as many tokens; None for a plan that it did not measure as here, and in
    a curriculum."""
    parts: StepParts

    def __post_init__(self) -> None:
        """Raise ValueError for steps that there cannot be."""
        if not 1 <= self.first_step <= self.last_step:
            raise ValueError(f"a window cannot have the steps {self.first_step} to {self.last_step}")
        speeds = (self.step_seconds, self.training_samples_per_second, self.tokens_per_second)
        if not all(0 < each < math.inf for each in speeds):
            raise ValueError(
                f"steps cannot have taken {self.step_seconds} s at {self.training_samples_per_second} samples/s"
            )

    @property
    def steps(self) -> int:
        return self.last_step - self.first_step + 1

    @property
    def change(self) -> float | None:
        """Speed over the promised one, less 1; None where nothing was promised."""
        promised = self.promised_samples_per_second
        return None if promised is None else self.training_samples_per_second / promised - 1
