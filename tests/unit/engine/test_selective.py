"""Selective recomputation of a layer: what it keeps, what runs again, and when memory is freed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import silu
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from trials.engine.memory import SavedTensorMeter
from trials.recomputation.selective import run_selectively

ROWS, WIDTH, INNER = 32, 8, 24
FLOAT = 4
Run = Callable[[torch.Tensor], torch.Tensor]


class Gated(nn.Module):
    """The MLP of Llama, after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    @override
    def forward(self, states: torch.Tensor) -> torch.Tensor:
        normed = self.norm(states)
        output: torch.Tensor = states + self.down(silu(self.gate(normed)) * self.up(normed))
        return output


class Calls(TorchDispatchMode):
    """Counts the calls of each operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def meter_of(layer: nn.Module) -> SavedTensorMeter:
    return SavedTensorMeter(list(layer.parameters()), 0, 1 << 62)


def gradients(layer: nn.Module, run: Run, states: torch.Tensor) -> list[torch.Tensor]:
    layer.zero_grad()
    given = states.clone().requires_grad_()
    run(given).square().sum().backward()
    return [each.grad for each in (given, *layer.parameters()) if each.grad is not None]


def check(layer: nn.Module, run: Run, states: torch.Tensor) -> None:
    """The gradients are those of the layer that keeps everything, bit for bit."""
    usual = gradients(layer, run, states)
    found = gradients(layer, lambda given: run_selectively(layer, run, given), states)
    assert len(usual) == 1 + len(list(layer.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(usual, found, strict=True))


def test_only_products_their_inputs_and_statistics_are_kept() -> None:
    layer, meter = Gated(), meter_of(Gated())
    states = torch.randn(ROWS, WIDTH, requires_grad=True)
    meter = meter_of(layer)
    with meter.watch():
        output = run_selectively(layer, layer, states)
    # The states before the norm, and the outputs of gate and up: the norm and the gated product follow from these.
    assert meter.live_bytes == FLOAT * ROWS * (WIDTH + 2 * INNER)
    del output
    assert meter.live_bytes == 0  # without a backward pass, and without a search for garbage


def test_what_was_kept_before_its_inputs_is_dropped_when_they_are_kept() -> None:
    layer = Gated()

    def run(states: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = layer.up(states)
        # Autograd saves the output of the sigmoid, and then the inner states, from which it follows.
        output: torch.Tensor = layer.down(inner * torch.sigmoid(1.702 * inner))
        return output

    meter = meter_of(layer)
    states = torch.randn(ROWS, WIDTH)
    with meter.watch():
        output = run_selectively(layer, run, states.requires_grad_())
    assert meter.live_bytes == FLOAT * ROWS * (WIDTH + INNER)
    output.sum().backward()
    assert meter.live_bytes == 0


def test_no_product_runs_again() -> None:
    layer = Gated()
    counts = []
    runs: tuple[Run, ...] = layer, lambda states: run_selectively(layer, layer, states)
    for run in runs:
        output = run(torch.randn(ROWS, WIDTH, requires_grad=True))
        with Calls() as calls:
            output.sum().backward()
        counts.append(calls.counts)
    usual, selective = counts
    assert usual["mm"] == selective["mm"]
    assert "native_layer_norm" not in usual
    assert selective["native_layer_norm"] == 1  # for three tensors: statistics, and the input of both linear layers


def test_what_was_computed_again_is_freed_when_autograd_has_used_it() -> None:
    layer = Gated()
    meter = meter_of(layer)
    states = torch.randn(ROWS, WIDTH, requires_grad=True)
    with meter.watch():
        output = run_selectively(layer, layer, states)
        kept = meter.live_bytes
        output.sum().backward()
    # The gated product and its activation come and go before the output of the norm is needed.
    assert kept < meter.peak_bytes <= kept + FLOAT * ROWS * 2 * INNER
    assert meter.live_bytes == 0


def test_what_one_use_computed_again_does_not_wait_for_a_later_use_of_it() -> None:
    layer = Gated()

    def run(states: torch.Tensor) -> torch.Tensor:
        active = silu(layer.gate(states))
        output: torch.Tensor = layer.down(active + 1)
        return output + (active * active)[:, :WIDTH]  # the last operation, so that its backward pass is first

    meter = meter_of(layer)
    with meter.watch():
        output = run_selectively(layer, run, torch.randn(ROWS, WIDTH, requires_grad=True))
        kept = meter.live_bytes
        output.sum().backward()
    assert meter.peak_bytes == kept + FLOAT * ROWS * INNER


def test_gradients_do_not_change() -> None:
    layer = Gated()
    check(layer, layer, torch.randn(ROWS, WIDTH))


def test_nothing_is_computed_from_a_tensor_that_was_changed_in_place() -> None:
    layer = nn.Linear(WIDTH, WIDTH)

    def run(states: torch.Tensor) -> torch.Tensor:
        few: torch.Tensor = layer(states)
        many = few.expand(ROWS, WIDTH) + 1  # less is kept with the few, of which autograd saves nothing
        squares = many * many
        few.add_(1)
        return squares + few

    check(layer, run, torch.randn(1, WIDTH))


def test_a_shared_input_is_kept_once_and_a_larger_copy_of_it_not_at_all() -> None:
    layer = nn.Linear(WIDTH, WIDTH)

    def run(states: torch.Tensor) -> torch.Tensor:
        keys: torch.Tensor = layer(states)
        repeated = keys[:, None].expand(-1, 4, -1).reshape(-1, WIDTH)  # as the keys of grouped heads
        return repeated * repeated

    states = torch.randn(ROWS, WIDTH)
    check(layer, run, states)
    meter = meter_of(layer)
    with meter.watch():
        output = run_selectively(layer, run, states.requires_grad_())
    assert meter.live_bytes == FLOAT * ROWS * 2 * WIDTH  # the states, and the keys that the linear layer gave
    del output


@pytest.mark.parametrize("trains", [True, False])
def test_a_layer_without_a_backward_pass_keeps_nothing(trains: bool) -> None:
    layer = Gated().requires_grad_(trains)
    meter = meter_of(layer)
    with meter.watch(), torch.set_grad_enabled(not trains):
        run_selectively(layer, layer, torch.randn(ROWS, WIDTH))
    assert meter.peak_bytes == 0
