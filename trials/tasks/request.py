"""Requests of the agent to the ranks: one message, the same for all of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from trials import channels
from trials.certification import Reference
from trials.channels import Channel
from trials.data.epoch import CostWeights
from trials.job import Job
from trials.plan import Plan, ZeroStage

REQUEST = "request.json"
"""Name of the message."""
WINDOW_STEPS = 10
"""Steps of a training over which the times of the ranks are averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Task to run a few steps of the first epoch and time the last ones."""

    warmup_steps: tuple[int, ...]
    """Numbers in the epoch of the steps that run first and are not timed."""
    timed_steps: tuple[int, ...]
    steered: bool = False
    """Whether to wait for the agent's verdict after each timed step but the last. `WarmPool.ask` sets it."""
    kind: Literal["trial"] = "trial"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSizes:
    """Sizes of packs at which layers are timed."""

    unit_counts: tuple[int, ...] = ()
    """Vision units of a pack."""
    sample_shapes: tuple[tuple[int, int], ...] = ()
    """(samples, tokens of each) of a pack."""
    image_units: int = 0
    """Vision units of an image; 0 for data without images: all units of a pack are one, and no sample shows any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Time each kind of layer alone, at several sizes, on every rank at once."""

    sizes: ProbeSizes
    curve_sizes: ProbeSizes
    """Further sizes for curves, timed where repeats of `sizes` agree; noise would hide what a curve adds."""
    curve_spread: float
    """Largest median spread of repeats that agree."""
    zero_stages: tuple[ZeroStage, ...]
    """ZeRO stages for which the update of data-parallel ranks is timed, when there are several ranks."""
    exchange_seconds: float | None
    """Seconds for all that ranks exchange: over slow links, less is timed. None to profile only the layers."""
    repeats: int
    of_node: int
    """Ranks on each node."""
    kind: Literal["profile"] = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Task to run every step of every epoch, from the last checkpoint in `output` when there is one."""

    output: Path
    """Folder of the checkpoints and the final model."""
    max_steps: int | None = None
    """Total steps after which to stop, with a checkpoint."""
    window_steps: int = WINDOW_STEPS
    """Steps over which the times of the ranks are averaged."""
    kind: Literal["training"] = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certification:
    """Task to compare the first steps of the training with a reference, and count the samples of the first epoch."""

    reference: Reference
    follows: bool = True
    """Whether the second step and one of the middle of the schedule are compared, too; else the first alone."""
    scratch: Path | None = None
    """Folder that is made for the weights which the training would write then, and removed; None to write none."""
    kind: Literal["certification"] = "certification"


Task: TypeAlias = Annotated[Trial | Profile | Training | Certification, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """All that a rank needs for a task. Paths in it are absolute."""

    job: Job
    plan: Plan
    task: Task
    index: Path
    """The saved dataset index."""
    weights: CostWeights
    """Weights of the cost by which packs are matched across data-parallel ranks."""
    memory_limit_bytes: int
    held_out: Path | None = None
    """The saved index of the samples on which a training is evaluated."""
    model_digest: str | None = None
    """Digest of the model's folder at the agent, where ranks on other nodes read a copy of it."""


def write_request(channel: Channel, request: Request) -> None:
    """Write the request to the channel over which the ranks will also answer it."""
    channels.send(channel, REQUEST, request)
