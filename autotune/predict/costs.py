"""Layer costs: time and memory of each kind of layer as a function of a pack's size, fitted to profiled layers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from trials.run.report import LayerKind, LayerTiming, ProfileReport

Kind: TypeAlias = LayerKind
KINDS: tuple[Kind, ...] = get_args(LayerKind)
Array: TypeAlias = NDArray[np.float64]

# On which columns of (units, tokens, squares, 1) the cost of each kind depends.
_TIME_TERMS: dict[Kind, tuple[int, ...]] = {
    "vision_embedding": (0, 3),
    "vision": (0, 3),
    "projector": (0, 1, 3),
    "language": (1, 2, 3),
    "head": (1, 3),
}
_BYTE_TERMS: dict[Kind, tuple[int, ...]] = {**_TIME_TERMS, "language": (1, 3)}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One kind of layer. Each field is four coefficients: of units, tokens, sum of squared lengths, and a constant."""

    forward_seconds: tuple[float, float, float, float]
    backward_seconds: tuple[float, float, float, float]
    """Without recomputation."""
    kept_bytes: tuple[float, float, float, float]
    """Kept for the backward pass without recomputation."""
    output_bytes: tuple[float, float, float, float]
    """What is kept of the next layer when that one is recomputed: its input."""
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """The costs of all kinds of layers of one model on one kind of hardware."""

    layers: tuple[tuple[Kind, LayerCost], ...]
    optimizer_seconds_per_parameter: float
    reduce_seconds_per_byte: float
    """Of averaging gradients over the data-parallel ranks."""
    residual: float
    """Median relative error of the fitted forward and backward times on the profiled sizes."""

    def __getitem__(self, kind: Kind) -> LayerCost:
        return dict(self.layers)[kind]


def fit_costs(reports: Sequence[ProfileReport]) -> LayerCosts:
    """Least squares with non-negative coefficients over the timings of all ranks, relative errors weighted alike."""
    timings = [timing for report in reports for timing in report.timings]
    parameters = dict(reports[0].parameters)
    layers = {kind: _fit_layer([t for t in timings if t.layer == kind], kind, parameters[kind]) for kind in KINDS}
    return LayerCosts(
        layers=tuple(layers.items()),
        optimizer_seconds_per_parameter=float(np.mean([r.optimizer_seconds_per_parameter for r in reports])),
        reduce_seconds_per_byte=float(np.mean([r.reduce_seconds_per_byte for r in reports])),
        residual=_residual(timings, layers),
    )


def _fit_layer(timings: Sequence[LayerTiming], kind: Kind, parameters: int) -> LayerCost:
    sizes = _sizes(timings)

    def fit(values: Iterable[float], terms: tuple[int, ...]) -> tuple[float, float, float, float]:
        return _non_negative_fit(sizes, np.fromiter(values, dtype=np.float64), terms)

    return LayerCost(
        forward_seconds=fit((t.forward_seconds for t in timings), _TIME_TERMS[kind]),
        backward_seconds=fit((t.backward_seconds for t in timings), _TIME_TERMS[kind]),
        kept_bytes=fit((t.kept_bytes for t in timings), _BYTE_TERMS[kind]),
        output_bytes=fit((t.output_bytes for t in timings), _BYTE_TERMS[kind]),
        parameters=parameters,
    )


def _sizes(timings: Sequence[LayerTiming]) -> Array:
    return np.array([(t.units, t.tokens, t.squares, 1) for t in timings], dtype=np.float64)


def _non_negative_fit(sizes: Array, values: Array, terms: tuple[int, ...]) -> tuple[float, float, float, float]:
    """Drops the most negative term and fits again until none is negative."""
    coefficients = np.zeros(4)
    active = list(terms)
    weights = 1 / np.maximum(values, values.max() * 1e-3 or 1.0)
    while active:
        solution, *_ = np.linalg.lstsq(sizes[:, active] * weights[:, None], values * weights, rcond=None)
        if (solution >= 0).all():
            coefficients[active] = solution
            break
        active.pop(int(np.argmin(solution * sizes[:, active].mean(axis=0))))
    units, tokens, squares, constant = coefficients.tolist()
    return units, tokens, squares, constant


def _residual(timings: Sequence[LayerTiming], layers: dict[Kind, LayerCost]) -> float:
    errors = []
    for timing in timings:
        cost = layers[timing.layer]
        size = np.array((timing.units, timing.tokens, timing.squares, 1), dtype=np.float64)
        predicted = float(size @ np.array(cost.forward_seconds) + size @ np.array(cost.backward_seconds))
        errors.append(abs(predicted / (timing.forward_seconds + timing.backward_seconds) - 1))
    return float(np.median(errors))
