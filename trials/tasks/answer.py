"""Answers of the ranks: one message of each."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from trials import channels
from trials.certification import EpochCount, InputCount, Reference, SavedCount, StepReport
from trials.channels import Channel
from trials.costs.coefficients import LayerKind, SlowCall
from trials.costs.exchange import ExchangeName
from trials.outcome import Crash, OutOfMemory, StageMeasurement
from trials.plan import ZeroStage
from trials.tasks.footprint import Footprint, footprint
from trials.tasks.stop import Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialReport:
    """The timed steps of a trial, as one rank measured them."""

    step_seconds: tuple[float, ...]
    """Seconds of the timed steps that ran: all of the request, or its first ones where the trial was steered."""
    losses: tuple[float, ...]
    samples: int
    """Samples of the timed steps, over all ranks."""
    text_tokens: int
    vision_units: int
    stage: StageMeasurement
    blank_samples: int = 0
    """Samples of all ranks that could not be read, also in warm-up steps."""
    blank_reason: str = ""
    """Why the first of them could not be read, with file and line; empty for none."""
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
    """Bytes kept for the backward pass without recomputation."""
    output_bytes: int
    """Bytes of the layer's output: all that is kept of the next layer when that one is recomputed."""
    recompute_seconds: float
    """Seconds that recomputation adds to both passes; 0 for kinds that are never recomputed."""
    shared_bytes: int
    """Bytes kept once by any number of such layers, in addition to the kept bytes of each."""
    transient_bytes: int
    """Bytes live during the passes beyond those kept and output; 0 where the meter does not count them."""
    spread: float
    """Interquartile range of the repeats, as a share of their median."""
    host_seconds: float = 0.0
    """Seconds in which the host enqueues both passes of a further layer of this kind for a device; 0 on a CPU, and for
    kinds of which a stage has one."""
    selective_seconds: float = 0.0
    """Seconds that selective recomputation adds to both passes; 0 for kinds without it, and for compiled layers."""
    selective_bytes: int = 0
    """Bytes kept with selective recomputation, without those that are shared."""
    selective_peak_bytes: int = 0
    """Most bytes live in the passes with selective recomputation, without the transient ones of other passes."""
    weight_seconds: float = 0.0
    """Seconds of weight gradients that the layer can defer; 0 for kinds that defer none, and for compiled layers."""
    deferral_seconds: float = 0.0
    """Seconds that deferring them adds to all passes."""
    weight_bytes: int = 0
    """Bytes kept from a backward pass until its deferred weight gradients are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadTiming:
    """Reading and encoding one pack of the job's data: the minimum of the repeats."""

    pixels: bool
    """Whether images are decoded to pixels, as for the first stage, or not, as for the last one."""
    units: int
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTiming:
    """The update of weights by the engine, without the time of averaging gradients."""

    zero: ZeroStage
    data_parallel: int
    """Number of data-parallel ranks."""
    seconds_per_parameter: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationTiming:
    """Messages of one rank in one layout, while all other ranks do the same."""

    pipeline: int
    data: int
    latency_seconds: float
    """Time of the messages that announce a pack's states to the next stage; 0 on the last stage."""
    seconds_per_byte: float
    """Time of sending states to the next stage; 0 on the last stage."""
    bucket_bytes: int = 0
    """Least bytes of gradients to average at once during a computation; 0 unless all ranks are data ranks."""
    hidden_share: float = 0.0
    """Share of averages in such buckets that a computation of the same length hides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeTiming:
    """An exchange on one rank for a pack of one size, while all ranks exchange: medians over the repeats.

    Fields have the meaning that they have in `trials.costs.exchange.Exchange`; without a `layer`, seconds are per byte.
    """

    name: ExchangeName
    ranks: int
    """Number of ranks that exchange with each other."""
    layer: LayerKind | None = None
    pipeline: int = 1
    within: int = 1
    tokens: int = 0
    """Of the whole pack; 0 for an exchange that does not depend on packs."""
    squares: int = 0
    """Of the whole pack."""
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    recompute_seconds: float = 0.0
    added_share: float = 1.0
    kept_bytes: int | None = None
    """Bytes that the layer keeps of the rank's part, as in `LayerTiming`; None where exchanges do not change them."""
    shared_bytes: int | None = None
    transient_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileReport:
    """Timings of every kind of layer, and of loading data, on one rank."""

    timings: tuple[LayerTiming, ...]
    loads: tuple[LoadTiming, ...]
    parameters: tuple[tuple[str, int], ...]
    """(kind of layer, parameters of one such layer)."""
    frozen_parameters: tuple[tuple[str, int], ...]
    """(kind of layer, those of its parameters that do not train)."""
    updates: tuple[UpdateTiming, ...] = ()
    """None where only the layers are profiled."""
    communications: tuple[CommunicationTiming, ...] = ()
    """Every pipeline x data of all ranks, from one stage on."""
    exchanges: tuple[ExchangeTiming, ...] = ()
    """Several sizes for each sequence and tensor degree that divides the ranks and is possible for the model; weights
    and gradients that all ranks hold in shards; averages over the data ranks of each layout."""
    tensor_parallel_parameters: int = 0
    """Parameters of a language layer of which each tensor rank holds a slice; 0 where layers cannot be cut."""
    tied_parameters: int = 0
    """Parameters of the head that are the word embedding's too."""
    chunk_targets: int = 0
    """Most targets whose logits the head holds at once; 0 where that is not known."""
    kept_states: tuple[int, ...] = ()
    """As in `LayerCosts`, like the next one."""
    added_features: int = 0
    shortened: tuple[tuple[str, float], ...] = ()
    """(exchange, largest share of its usual size that was timed): those that slow links would have made too long. The
    share is 0 where nothing was timed and the time was computed from others."""
    compile_seconds: float | None = None
    """Seconds in which the layers were compiled, at first passes of each kind; None where they are not."""
    slow_calls: tuple[SlowCall, ...] = ()
    """As in `LayerCosts`, on this rank."""
    kind: Literal["profile"] = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """The progress of a training when its ranks stop."""

    steps: int
    """Total optimizer steps, earlier runs included."""
    finished: bool
    """Whether every epoch is done and the final model is written."""
    model: Path | None
    blank_samples: int
    """Samples of all ranks, in this launch, that could not be read and were replaced by blank ones."""
    stopped: Stop | None = None
    """How the ranks were asked to stop; None where they did all that was left, the last evaluation included."""
    kind: Literal["training"] = "training"


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificationReport:
    """Steps under the plan and under the reference, as one rank computed them, and the epoch as it builds it."""

    reference: Reference
    """The requested one, or the stages where a sample holds a video."""
    steps: tuple[StepReport, ...]
    epoch: EpochCount
    inputs: InputCount
    """Records of this rank's share of the first step."""
    saved: SavedCount | None
    """None where the weights were not written."""
    faults: tuple[str, ...]
    """What differs where nothing may: inputs, learning rates, frozen and saved weights, in sentences."""
    kind: Literal["certification"] = "certification"


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """The cause for which the rank failed."""

    cause: Annotated[OutOfMemory | Crash, Field(discriminator="kind")]
    kind: Literal["failure"] = "failure"


Report: TypeAlias = Annotated[
    TrialReport | ProfileReport | TrainingReport | CertificationReport | FailureReport, Field(discriminator="kind")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The report of a rank after a request, failed or not, and the resources that its process holds."""

    report: Report
    footprint: Footprint


UNWRITABLE = os.EX_IOERR
"""Exit code of a rank that cannot write its report."""


def report_name(rank: int) -> str:
    return f"report-{rank}.json"


def begun_name(rank: int) -> str:
    """Return the name of the empty message that the rank writes when it begins with the request."""
    return f"begun-{rank}"


def error_name(rank: int) -> str:
    """Return the name of the message with the traceback of a rank that failed."""
    return f"error-{rank}.txt"


def write_report(channel: Channel, rank: int, report: Report) -> None:
    """Write the report with this process's current footprint."""
    channels.send(channel, report_name(rank), Answer(report=report, footprint=footprint()))


def read_report(channel: Channel, rank: int) -> Answer | None:
    """Return the rank's answer, or None while there is none. Raise WireError for one that cannot be decoded."""
    return channels.receive(Answer, channel, report_name(rank))
