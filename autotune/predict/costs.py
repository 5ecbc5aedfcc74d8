"""Layer costs: time and memory of each kind of layer as a function of a pack's size, fitted to profiled layers."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from autotune.errors import ProfileError
from autotune.predict.robust_fit import Coefficients, fit_not_negative
from trials.plan import Layout, ZeroStage
from trials.run.report import NOISE_LIMIT, LayerKind, LayerTiming, LoadTiming, ProfileReport

Kind: TypeAlias = LayerKind
KINDS: tuple[Kind, ...] = get_args(LayerKind)
Array: TypeAlias = NDArray[np.float64]
Quantity: TypeAlias = Callable[[LayerTiming], float]

NOTHING: Coefficients = (0.0, 0.0, 0.0, 0.0)

# On which columns of (units, tokens, squares, 1) the cost of each kind depends.
_TIME_TERMS: dict[Kind, tuple[int, ...]] = {
    "vision_embedding": (0, 3),
    "vision": (0, 3),
    "projector": (0, 1, 3),
    "language": (1, 2, 3),
    "head": (1, 3),
}
_BYTE_TERMS: dict[Kind, tuple[int, ...]] = _TIME_TERMS
_LOAD_TERMS = (0, 1, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """Sending a pack's states to the next stage; both are 0 where there is one rank."""

    latency_seconds: float
    """Of all messages that announce the states."""
    seconds_per_byte: float

    def __post_init__(self) -> None:
        """Raises ValueError for a number that no measurement can give."""
        _check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCost:
    """Reading and encoding a pack where it is needed, in coefficients like those of `LayerCost`."""

    pixels_seconds: Coefficients = NOTHING
    """On the first stage."""
    labels_seconds: Coefficients = NOTHING
    """On the last stage, when that is another one."""

    def __post_init__(self) -> None:
        """Raises ValueError for a number that no measurement can give."""
        _check(self)


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
    seconds_error: float = 0.0
    """Median relative error of the fitted forward and backward times together, on the profiled sizes."""
    bytes_error: float = 0.0
    """Largest relative error of the fitted kept bytes, on the profiled sizes."""
    noise: float = 0.0
    """Spread of the repeats that three of four sizes keep below, as a share of their median, once measured again."""

    def __post_init__(self) -> None:
        """Raises ValueError for a number that no measurement can give."""
        _check(self)

    @property
    def is_noisy(self) -> bool:
        return self.noise > NOISE_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCost:
    """The optimizer's step, and what the engine does around it beside averaging gradients."""

    zero: ZeroStage
    data_parallel: int
    """Ranks that it was measured on; with 1 there is no ZeRO."""
    seconds_per_parameter: float
    """Of the stage, on every rank."""

    def __post_init__(self) -> None:
        """Raises ValueError for a number that no measurement can give."""
        _check(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """The costs of all kinds of layers of one model on one kind of hardware."""

    layers: tuple[tuple[Kind, LayerCost], ...]
    loading: LoadCost
    link: LinkCost
    updates: tuple[UpdateCost, ...]
    """That of a rank alone first."""
    reduce_seconds_per_byte: float
    """Of averaging gradients over the data-parallel ranks."""
    residual: float
    """Median relative error of the fitted forward and backward times on the profiled sizes."""

    def __post_init__(self) -> None:
        """Raises ValueError for a number that no measurement can give, and where a kind of layer is missing."""
        _check(self)
        if missing := [kind for kind in KINDS if kind not in dict(self.layers)]:
            raise ValueError(f"there are no costs of {', '.join(missing)}")

    def __getitem__(self, kind: Kind) -> LayerCost:
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
    def noisy_kinds(self) -> tuple[Kind, ...]:
        """Those whose times are marked: they were measured again and stayed apart."""
        return tuple(kind for kind, cost in self.layers if cost.is_noisy)


def fit_costs(reports: Sequence[ProfileReport]) -> LayerCosts:
    """Robust fits with non-negative coefficients over the timings of all ranks, relative errors weighted alike.

    Raises ProfileError for a measurement that is negative or no number.
    """
    timings = [timing for report in reports for timing in report.timings]
    loads = [timing for report in reports for timing in report.loads]
    try:
        for measured in (*reports, *timings, *loads, *(update for report in reports for update in report.updates)):
            _check(measured)
    except ValueError as error:
        raise ProfileError(f"the layers were timed wrongly: {error}; profile again on an idle machine") from error
    parameters = dict(reports[0].parameters)
    layers = {kind: _fit_layer([t for t in timings if t.layer == kind], kind, parameters[kind]) for kind in KINDS}
    return LayerCosts(
        layers=tuple(layers.items()),
        loading=LoadCost(
            pixels_seconds=_fit_load([load for load in loads if load.pixels]),
            labels_seconds=_fit_load([load for load in loads if not load.pixels]),
        ),
        link=LinkCost(
            # A pipeline is as slow as its slowest link.
            latency_seconds=max(report.link_latency_seconds for report in reports),
            seconds_per_byte=max(report.link_seconds_per_byte for report in reports),
        ),
        updates=tuple(
            UpdateCost(
                zero=same[0].zero,
                data_parallel=same[0].data_parallel,
                # The rank that comes last waits for no other.
                seconds_per_parameter=min(timing.seconds_per_parameter for timing in same),
            )
            for same in zip(*(report.updates for report in reports), strict=True)
        ),
        reduce_seconds_per_byte=float(np.mean([report.reduce_seconds_per_byte for report in reports])),
        residual=float(np.median(np.concatenate([_time_errors(timings, kind, layers[kind]) for kind in KINDS]))),
    )


def _fit_layer(timings: Sequence[LayerTiming], kind: Kind, parameters: int) -> LayerCost:
    sizes = _sizes(timings)

    def fit(quantity: Quantity, terms: tuple[int, ...]) -> Coefficients:
        return fit_not_negative(sizes, np.array([quantity(t) for t in timings], dtype=np.float64), terms)

    cost = LayerCost(
        forward_seconds=fit(lambda t: t.forward_seconds, _TIME_TERMS[kind]),
        backward_seconds=fit(lambda t: t.backward_seconds, _TIME_TERMS[kind]),
        recompute_seconds=fit(lambda t: t.recompute_seconds, _TIME_TERMS[kind]),
        kept_bytes=fit(lambda t: t.kept_bytes, _BYTE_TERMS[kind]),
        output_bytes=fit(lambda t: t.output_bytes, _BYTE_TERMS[kind]),
        shared_bytes=fit(lambda t: t.shared_bytes, _BYTE_TERMS[kind]),
        transient_bytes=fit(lambda t: t.transient_bytes, _BYTE_TERMS[kind]),
        parameters=parameters,
    )
    return _with_errors(cost, timings, kind)


def _fit_load(timings: Sequence[LoadTiming]) -> Coefficients:
    sizes = np.array([(t.units, t.tokens, 0, 1) for t in timings], dtype=np.float64)
    return fit_not_negative(sizes, np.array([t.seconds for t in timings]), _LOAD_TERMS)


def _with_errors(cost: LayerCost, timings: Sequence[LayerTiming], kind: Kind) -> LayerCost:
    values = {field.name: getattr(cost, field.name) for field in fields(cost)}
    kept = np.array([t.kept_bytes for t in timings], dtype=np.float64)
    byte_errors = np.abs(_sizes(timings) @ np.array(cost.kept_bytes) - kept) / np.maximum(kept, 1)
    values["seconds_error"] = float(np.median(_time_errors(timings, kind, cost)))
    values["bytes_error"] = float(byte_errors.max())
    values["noise"] = float(np.quantile([t.spread for t in timings], 0.75))
    return LayerCost(**values)


def _sizes(timings: Sequence[LayerTiming]) -> Array:
    return np.array([(t.units, t.tokens, t.squares, 1) for t in timings], dtype=np.float64)


def _time_errors(timings: Sequence[LayerTiming], kind: Kind, cost: LayerCost) -> Array:
    of_kind = [t for t in timings if t.layer == kind]
    measured = np.array([t.forward_seconds + t.backward_seconds for t in of_kind])
    predicted = _sizes(of_kind) @ (np.array(cost.forward_seconds) + np.array(cost.backward_seconds))
    errors: Array = np.abs(predicted / measured - 1)
    return errors


def _check(measured: object) -> None:
    """Raises ValueError, with the field, for a number in the dataclass that is negative, infinite or none at all."""
    for field in fields(measured):  # type: ignore[arg-type]
        value = getattr(measured, field.name)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not (math.isfinite(number) and number >= 0):
                raise ValueError(f"{field.name} is {number}, which no measurement gives")
