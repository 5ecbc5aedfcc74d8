"""Gradients that lie in buffers are those that torch would keep by themselves."""

import pytest
import torch
from torch import nn

from trials.engine.gradients import messages
from trials.engine.gradients.flat import FlatGradients
from trials.engine.gradients.overlapped_averages import adjoining


def module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))


def gradients_of(layers: nn.Module) -> list[torch.Tensor]:
    for seed in (1, 2):
        torch.manual_seed(seed)
        layers(torch.randn(4, 5)).square().sum().backward()
    return [each.grad.clone() for each in layers.parameters() if each.grad is not None]


@pytest.mark.parametrize("most", [10, 40, 1000])
def test_backward_passes_add_to_buffers_in_place(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(messages, "BUCKET", most)
    expected, layers = gradients_of(module()), module()
    flat = FlatGradients(list(layers.parameters()))
    places = [each.grad.data_ptr() for each in layers.parameters() if each.grad is not None]
    for _ in range(2):
        for found, wanted in zip(gradients_of(layers), expected, strict=True):
            torch.testing.assert_close(found, wanted)
        assert [each.grad.data_ptr() for each in layers.parameters() if each.grad is not None] == places
        flat.clear()
    assert not any(each.grad.any() for each in layers.parameters() if each.grad is not None)
    flat.close()
    assert all(each.grad is None for each in layers.parameters())


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_clipping_is_that_of_torch(share: float) -> None:
    plain, layers = module(), module()
    expected = gradients_of(plain)
    norm = torch.linalg.vector_norm(torch.cat([each.flatten() for each in expected]))
    flat = FlatGradients(list(layers.parameters()))
    gradients_of(layers)
    assert flat.clip(share * float(norm)) == pytest.approx(float(norm), rel=1e-6)
    nn.utils.clip_grad_norm_(plain.parameters(), share * float(norm))
    for found, wanted in zip(layers.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad)


def test_the_norm_of_many_parameters_is_exact() -> None:
    layers = nn.ParameterList([nn.Parameter(torch.zeros(100_000)) for _ in range(50)])
    flat = FlatGradients(list(layers))
    torch.manual_seed(0)
    for each in layers:
        assert each.grad is not None
        each.grad.normal_()
    exact = float(torch.cat([each.grad.double() for each in layers if each.grad is not None]).norm())
    assert flat.clip(1.0) == pytest.approx(exact, rel=1e-5)


def test_neighbours_in_a_buffer_are_one_view_and_others_are_not() -> None:
    layers = module()
    flat = FlatGradients(list(layers.parameters()))
    gradients = [each.grad for each in layers.parameters() if each.grad is not None]
    found = adjoining(gradients[1:4])
    assert found is not None
    found.fill_(3.0)
    assert [bool((each == 3.0).all()) for each in gradients] == [False, True, True, True, False]
    assert adjoining(gradients[1::2]) is None
    assert adjoining([gradients[1], gradients[0]]) is None
    flat.close()
    apart = torch.zeros(8)
    assert adjoining([apart[:4], apart[4:].clone()]) is None
    assert adjoining([apart.view(4, 2).t()]) is None
