"""Outcomes of a trial: `Completed`, `Rejected` or `Failed`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias

from pydantic import Field


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMeasurement:
    """One rank's share of the timed steps; the seconds are means per step."""

    stage: int
    data_rank: int
    load_seconds: float
    """Waiting for data: the first stage loads pixels, the last one labels."""
    forward_seconds: float
    backward_seconds: float
    """Recomputation included."""
    optimizer_seconds: float
    """Gradient reduction and optimizer step."""
    idle_seconds: float
    """The rest of the step: communication, and waiting for other ranks. What a rank reports of itself has its waiting
    in the reduction as part of the update; `waiting_apart` moves it here."""
    peak_bytes: int
    """Peak of the live bytes: static, kept for the backward pass, and transient."""
    static_bytes: int
    """Weights, gradients and optimizer states."""
    tensor_rank: int = 0
    """Number among the ranks that hold a copy of the stage together, from 0."""


def waiting_apart(ranks: Sequence[StageMeasurement]) -> tuple[StageMeasurement, ...]:
    """Return the ranks with the least update of their stage, and the rest of their own update as waiting.

    The ranks of a stage reduce together, so each waits inside its update for the one that comes last, whose update is
    the shortest.
    """
    least: dict[int, float] = {}
    for rank in ranks:
        least[rank.stage] = min(rank.optimizer_seconds, least.get(rank.stage, rank.optimizer_seconds))
    return tuple(
        replace(
            rank,
            optimizer_seconds=least[rank.stage],
            idle_seconds=rank.idle_seconds + rank.optimizer_seconds - least[rank.stage],
        )
        for rank in ranks
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measurement of the timed steps of a trial, over all ranks."""

    steps: tuple[int, ...]
    """The steps of the epoch that were timed, warm-up excluded."""
    step_seconds: tuple[float, ...]
    """Wall-clock seconds of each timed step on the slowest rank."""
    samples: int
    """Samples in the timed steps."""
    text_tokens: int
    vision_units: int
    losses: tuple[float, ...]
    """Mean loss over all target tokens of each timed step."""
    stages: tuple[StageMeasurement, ...]
    """One entry per rank, in order of rank."""

    def __post_init__(self) -> None:
        """Raise ValueError without ranks, without timed steps, and for a step without duration."""
        if not self.stages:
            raise ValueError("a measurement needs at least one rank")
        if not self.step_seconds or min(self.step_seconds) <= 0:
            raise ValueError(f"a measurement needs timed steps of more than 0 s, not {list(self.step_seconds)}")

    @property
    def measured_samples_per_second(self) -> float:
        return self.samples / sum(self.step_seconds)

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of the rank that needs most."""
        return max(stage.peak_bytes for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A rank needed more bytes than its device, or than `memory_limit`."""

    stage: int
    rank: int
    needed_bytes: int
    limit_bytes: int
    kind: Literal["out-of-memory"] = "out-of-memory"

    def __str__(self) -> str:
        mebi = 1 << 20
        return (
            f"out of memory on stage {self.stage} (rank {self.rank}): "
            f"{self.needed_bytes / mebi:.1f} MiB needed, limit {self.limit_bytes / mebi:.1f} MiB"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """A rank raised an error or its process died."""

    rank: int
    detail: str
    """The last lines of the error, or the signal that ended the process."""
    of_machine: bool = False
    """Whether it is no fault of the plan: a lost node, a full disk."""
    kind: Literal["crash"] = "crash"

    def __str__(self) -> str:
        return f"rank {self.rank} failed: {self.detail}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeout:
    """The ranks gave no result in time and were ended."""

    seconds: float
    kind: Literal["timeout"] = "timeout"

    def __str__(self) -> str:
        return f"no result within {self.seconds:g} s"


# The texts of causes are stored with them, and `db check` compares both: another wording would damage every database.
Cause: TypeAlias = Annotated[OutOfMemory | Crash | Timeout, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """The plan ran and was measured."""

    measurement: Measurement
    shortened: bool = False
    """Ended early because it was clearly worse than another plan: no measurement to rank it by."""
    kind: Literal["completed"] = "completed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """The plan never ran: it cannot fit or is not valid."""

    reason: str
    kind: Literal["rejected"] = "rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The plan ran and did not finish."""

    cause: Cause
    kind: Literal["failed"] = "failed"


Outcome: TypeAlias = Annotated[Completed | Rejected | Failed, Field(discriminator="kind")]
