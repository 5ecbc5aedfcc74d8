"""Costs as coefficients of a pack's sizes, by kind of layer."""

from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field

from trials.units import check_measured

LayerKind: TypeAlias = Literal["vision_embedding", "vision", "projector", "language", "head"]
"""Kinds of layers, in the order of the chain."""
KINDS: tuple[LayerKind, ...] = get_args(LayerKind)
SlowCause: TypeAlias = Literal["convolution", "dropout", "dtype", "mask", "widths"]
Measured: TypeAlias = Annotated[float, Field(le=1e15)]
"""Seconds, bytes or a share. The bound keeps sums of products of such numbers finite; larger ones are refused."""
Coefficients: TypeAlias = tuple[Measured, Measured, Measured, Measured]
SlowCall: TypeAlias = tuple[LayerKind, SlowCause, Coefficients, Coefficients]
"""(kind, convolution or what keeps attention from a fused kernel, seconds of both passes, those of a faster way)."""

NOTHING: Coefficients = (0.0, 0.0, 0.0, 0.0)


def times(coefficients: Coefficients, factor: float) -> Coefficients:
    """Return the coefficients times a factor."""
    units, tokens, squares, constant = coefficients
    return units * factor, tokens * factor, squares * factor, constant * factor


def added(one: Coefficients, other: Coefficients) -> Coefficients:
    """Return the sums of the coefficients of two costs."""
    return one[0] + other[0], one[1] + other[1], one[2] + other[2], one[3] + other[3]


class MeasuredCost:
    """Base of costs that are refused, with ValueError, for a number that no measurement can give."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_measured(self)
