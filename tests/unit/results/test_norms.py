"""Norms and products part by part are those of the whole tensors in float64."""

import math

import pytest
import torch

from trials.tasks.certifying import norms

SHAPES = [(), (1,), (7, 5), (3, 1 << 19)]


@pytest.mark.parametrize("shape", SHAPES)
def test_parts_add_up(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    one, other = torch.randn(shape), torch.randn(shape).bfloat16()
    first, second = one.double(), other.double()
    assert norms.norm_of(one) == pytest.approx(float(first.norm()), rel=1e-12)
    assert norms.distance(one, other) == pytest.approx(float((one - other.float()).double().norm()), rel=1e-12)
    assert norms.product(one, other) == pytest.approx(float((first * second).sum()), rel=1e-9)
    assert norms.largest(one) == float(one.abs().max())
    mean = 0.9 * first + 0.1 * second
    found = norms.newest(mean.float(), one, 0.9)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, ((mean.float().double() - 0.9 * first) / (1 - 0.9)).float(), rtol=0, atol=0)
    torch.testing.assert_close(norms.newest(one, None, 0.9), (first / (1 - 0.9)).float(), rtol=0, atol=0)


def test_a_transposed_tensor_and_nan_are_counted() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    assert norms.distance(tensor, tensor.contiguous()) == 0
    assert math.isnan(norms.norm_of(torch.tensor([1.0, math.nan])))
    assert math.isnan(norms.largest(torch.tensor([1.0, math.nan])))


@pytest.mark.parametrize("apart", [1, 1 << 20])
def test_infinities_are_told_and_not_raised(apart: int) -> None:
    """Inside one part and in different ones."""
    endless, mixed = torch.zeros(1 + apart), torch.zeros(1 + apart)
    endless[0] = endless[apart] = math.inf
    mixed[0], mixed[apart] = math.inf, math.nan
    signs = torch.ones(1 + apart)
    signs[0] = -1
    assert norms.norm_of(endless) == math.inf
    assert math.isnan(norms.norm_of(mixed))
    assert math.isnan(norms.product(endless, signs))
    assert math.isnan(norms.distance(endless, endless))
