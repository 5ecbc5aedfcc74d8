"""Time and memory of each kind of layer as functions of a pack's size: what profiles come to, and are kept as."""

import math
from dataclasses import dataclass, fields, replace
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field

from trials.plan import Layout, ZeroStage

LayerKind: TypeAlias = Literal["vision_embedding", "vision", "projector", "language", "head"]
"""In the order of the chain."""
KINDS: tuple[LayerKind, ...] = get_args(LayerKind)
Measured: TypeAlias = Annotated[float, Field(le=1e15)]
"""Seconds, bytes or a share. Files with more are refused when they are read: sums of products of it stay finite."""
Coefficients: TypeAlias = tuple[Measured, Measured, Measured, Measured]

NOISE_LIMIT = 0.20
"""A layer's times are noisy when its repeats spread by more than this share of their median."""
NOTHING: Coefficients = (0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """Sending a pack's states to the next stage; both are 0 where there is one rank."""

    latency_seconds: Measured
    """Of all messages that announce the states."""
    seconds_per_byte: Measured

    def __post_init__(self) -> None:
        """Raises ValueError for a number that no measurement can give."""
        check_measured(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCost:
    """Reading and encoding a pack where it is needed, in coefficients like those of `LayerCost`."""

    pixels_seconds: Coefficients = NOTHING
    """On the first stage."""
    labels_seconds: Coefficients = NOTHING
    """On the last stage, when that is another one."""

    def __post_init__(self) -> None:
        """Raises ValueError for a number that no measurement can give."""
        check_measured(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One kind of layer. Each cost is four coefficients: of units, tokens, sum of squared lengths, and a constant."""

    forward_seconds: Coefficients
    backward_seconds: Coefficients
    """Without recomputation."""
    recompute_seconds: Coefficients
    """What recomputation adds to forward and backward together; nothing for kinds that are never recomputed."""
    kept_bytes: Coefficients
    """Kept for the backward pass without recomputation, for each layer."""
    output_bytes: Coefficients
    """What is kept of the next layer when that one is recomputed: its input."""
    parameters: int
    shared_bytes: Coefficients = NOTHING
    """Kept once, however many layers of the kind stand on a stage: rotary embeddings."""
    transient_bytes: Coefficients = NOTHING
    """Live during the pass beyond what is kept: gradients and work space. Nothing where the meter counts none."""
    seconds_error: Measured = 0.0
    """Median relative error of the fitted forward and backward times together, on the profiled sizes."""
    bytes_error: Measured = 0.0
    """Largest relative error of the fitted kept bytes, on the profiled sizes."""
    noise: Measured = 0.0
    """Spread of the repeats that three of four sizes keep below, as a share of their median, once measured again."""

    def __post_init__(self) -> None:
        """Raises ValueError for a number that no measurement can give."""
        check_measured(self)

    @property
    def is_noisy(self) -> bool:
        return self.noise > NOISE_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCost:
    """The optimizer's step, and what the engine does around it beside averaging gradients."""

    zero: ZeroStage
    data_parallel: int
    """Ranks that it was measured on; with 1 there is no ZeRO."""
    seconds_per_parameter: Measured
    """Of the stage, on every rank."""

    def __post_init__(self) -> None:
        """Raises ValueError for a number that no measurement can give."""
        check_measured(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """The costs of all kinds of layers of one model on one kind of hardware."""

    layers: tuple[tuple[LayerKind, LayerCost], ...]
    loading: LoadCost
    link: LinkCost
    updates: tuple[UpdateCost, ...]
    """That of a rank alone first."""
    reduce_seconds_per_byte: Measured
    """Of averaging gradients over the data-parallel ranks."""
    residual: Measured
    """Median relative error of the fitted forward and backward times on the profiled sizes."""

    def __post_init__(self) -> None:
        """Raises ValueError for a number that no measurement can give, and unless every kind of layer has one cost."""
        check_measured(self)
        kinds = [kind for kind, _ in self.layers]
        if missing := [kind for kind in KINDS if kind not in kinds]:
            raise ValueError(f"there are no costs of {', '.join(missing)}")
        if len(kinds) > len(KINDS):
            raise ValueError(f"there are costs of {len(kinds)} kinds of layers; there are only {', '.join(KINDS)}")
        if not self.updates:
            raise ValueError("there is no cost of an update")

    def __getitem__(self, kind: LayerKind) -> LayerCost:
        return dict(self.layers)[kind]

    def update_seconds_per_parameter(self, layout: Layout) -> float:
        """Of the optimizer alone. What was not measured is that of a single rank, shared out by ZeRO."""
        wanted = (layout.zero, layout.data > 1)
        found = {(update.zero, update.data_parallel > 1): update.seconds_per_parameter for update in self.updates}
        alone = self.updates[0].seconds_per_parameter
        return found.get(wanted, alone / layout.data if layout.zero else alone)

    def with_workers(self, workers: int) -> "LayerCosts":
        """The same where so many processes load data: with any, packs are ready when they are asked for."""
        return replace(self, loading=LoadCost()) if workers else self

    @property
    def noisy_kinds(self) -> tuple[LayerKind, ...]:
        """Those whose times are marked: they were measured again and stayed apart."""
        return tuple(kind for kind, cost in self.layers if cost.is_noisy)


def check_measured(measured: object) -> None:
    """Raises ValueError, with the field, for a number in the dataclass that is negative, infinite or none at all."""
    for field in fields(measured):  # type: ignore[arg-type]
        value = getattr(measured, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not (math.isfinite(number) and number >= 0):
                raise ValueError(f"{field.name} is {number}, which no measurement gives")
