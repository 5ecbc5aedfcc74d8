"""What the agent asks of the ranks: one JSON file, the same for all of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from trials import wire
from trials.data.epoch import CostWeights
from trials.job import Job
from trials.plan import Plan, ZeroStage

REQUEST_FILE = "request.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Run a few steps of the first epoch and time the last ones."""

    warmup_steps: tuple[int, ...]
    """Run first and not timed; by their number in the epoch."""
    timed_steps: tuple[int, ...]
    steered: bool = False
    """Wait after each timed step but the last for the agent's verdict. `WarmPool.ask` sets it."""
    kind: Literal["trial"] = "trial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Time each kind of layer alone, at several sizes, on every rank at once."""

    unit_counts: tuple[int, ...]
    """Vision units of a pack."""
    sample_shapes: tuple[tuple[int, int], ...]
    """(samples, tokens of each) of a pack."""
    zero_stages: tuple[ZeroStage, ...]
    """With which the update of data-parallel ranks is timed, when there are several ranks."""
    repeats: int
    kind: Literal["profile"] = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Run every step of every epoch, from the last checkpoint in `output` when there is one."""

    output: Path
    """Folder of the checkpoints and the final model."""
    max_steps: int | None = None
    """Stop, with a checkpoint, after this many steps in all."""
    kind: Literal["training"] = "training"


Task: TypeAlias = Annotated[Trial | Profile | Training, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """All that a rank needs. Paths in it are absolute."""

    job: Job
    plan: Plan
    task: Task
    index: Path
    """The saved dataset index."""
    weights: CostWeights
    """By which packs are matched across data-parallel ranks."""
    memory_limit_bytes: int


def write_request(folder: Path, request: Request) -> None:
    """Makes the folder, in which the ranks will also leave their reports."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / REQUEST_FILE).write_text(wire.encode(request))
