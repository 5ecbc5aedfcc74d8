"""Norms and products of large tensors in float64, part by part: a whole copy takes most of the time to allocate."""

import math
from collections.abc import Iterator

import torch

# A choice: float64 copies of 8 MiB in place of copies of a whole weight.
_PART = 1 << 20
"""Values at once."""


def norm_of(tensor: torch.Tensor) -> float:
    """Return the Euclidean norm."""
    return math.sqrt(sum(_square(part) for (part,) in _parts(tensor)))


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the Euclidean norm of the difference in float32."""
    return math.sqrt(sum(_square(first.float() - second.float()) for first, second in _parts(one, other)))


def product(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the inner product."""
    return sum(float(torch.dot(first.double(), second.double())) for first, second in _parts(one, other))


def largest(tensor: torch.Tensor) -> float:
    """Return the largest absolute value."""
    least, most = tensor.aminmax()
    return max(-float(least), float(most))


def newest(mean: torch.Tensor, before: torch.Tensor | None, beta: float) -> torch.Tensor:
    """Return g, float32, of the running mean `beta * before + (1 - beta) * g`, without `before` of the first one.

    It is computed in float64, since the difference loses digits.
    """
    found = torch.empty(mean.shape)
    if before is None:
        for into, part in _parts(found, mean):
            into.copy_(part.double() / (1 - beta))
        return found
    for into, part, past in _parts(found, mean, before):
        into.copy_((part.double() - beta * past.double()) / (1 - beta))
    return found


def _square(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double())) ** 2


def _parts(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    return zip(*(each.flatten().split(_PART) for each in tensors), strict=True)
