"""What a rank answers: one JSON file per rank, written whole or not at all."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from trials import wire
from trials.layer_costs import LayerKind
from trials.outcome import Crash, OutOfMemory, StageMeasurement
from trials.plan import ZeroStage
from trials.tasks.footprint import Footprint, footprint


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReport:
    """One rank's view of the timed steps."""

    step_seconds: tuple[float, ...]
    """Of the steps that ran: the first of the request's timed steps, all of them unless it was steered."""
    losses: tuple[float, ...]
    samples: int
    """In the timed steps, over all ranks."""
    text_tokens: int
    vision_units: int
    stage: StageMeasurement
    kind: Literal["trial"] = "trial"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTiming:
    """One kind of layer at one size: medians over the repeats, in seconds and bytes."""

    layer: LayerKind
    units: int
    tokens: int
    squares: int
    """Sum of the squared sample lengths."""
    forward_seconds: float
    backward_seconds: float
    kept_bytes: int
    """Kept for the backward pass without recomputation."""
    output_bytes: int
    """What the layer hands on: all that is kept of the next layer when that one is recomputed."""
    recompute_seconds: float
    """What recomputation adds to both passes; 0 for kinds that are never recomputed."""
    shared_bytes: int
    """Kept once by any number of such layers, beside the kept bytes of each."""
    transient_bytes: int
    """Live during the passes beyond what is kept and handed on; 0 where the meter does not count it."""
    spread: float
    """Interquartile range of the repeats, as a share of their median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTiming:
    """Reading and encoding one pack of the job's data: the least seconds of the repeats."""

    pixels: bool
    """With pixels, as for the first stage; without, as for the last one."""
    units: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTiming:
    """The update of weights by the engine, less the time of averaging gradients."""

    zero: ZeroStage
    data_parallel: int
    """Ranks."""
    seconds_per_parameter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileReport:
    """Timings of every kind of layer, and of loading data, on one rank."""

    timings: tuple[LayerTiming, ...]
    loads: tuple[LoadTiming, ...]
    parameters: tuple[tuple[str, int], ...]
    """(kind of layer, parameters of one such layer)."""
    updates: tuple[UpdateTiming, ...]
    reduce_seconds_per_byte: float
    """Of an all-reduce over all ranks; 0 for a single one."""
    link_latency_seconds: float
    """Of the messages that announce a pack's states to a neighbouring rank; 0 for a single one."""
    link_seconds_per_byte: float
    kind: Literal["profile"] = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """How far the training came."""

    steps: int
    """Optimizer steps done in all, earlier runs included."""
    finished: bool
    """Whether every epoch is done and the final model is written."""
    model: Path | None
    blank_samples: int
    """Samples of this rank, in this launch, that could not be read and taught nothing."""
    kind: Literal["training"] = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """Why the rank gave up."""

    cause: Annotated[OutOfMemory | Crash, Field(discriminator="kind")]
    kind: Literal["failure"] = "failure"


Report: TypeAlias = Annotated[TrialReport | ProfileReport | TrainingReport | FailureReport, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a rank leaves when it has served a request, well or not."""

    report: Report
    footprint: Footprint


UNWRITABLE = os.EX_IOERR
"""Exit code of a rank that cannot write its report."""


def report_path(folder: Path, rank: int) -> Path:
    return folder / f"report-{rank}.json"


def begun_path(folder: Path, rank: int) -> Path:
    """An empty file that the rank makes when it begins with the request."""
    return folder / f"begun-{rank}"


def write_report(folder: Path, rank: int, report: Report) -> None:
    """With what this process holds now. The file appears under its name only when it is complete."""
    wire.write(report_path(folder, rank), Answer(report=report, footprint=footprint()))


def read_report(folder: Path, rank: int) -> Answer | None:
    """The rank's report, or None while there is none. Raises WireError for one that cannot be decoded."""
    return wire.read(Answer, report_path(folder, rank))
