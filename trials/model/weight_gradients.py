"""Weight gradients of linear layers, computed apart from the gradients of their inputs, and later.

Zero Bubble Pipeline Parallelism (Qi et al. 2023): only gradients of inputs are awaited by the stage before, so a stage
can compute those of its weights when it would wait otherwise.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from trials.recomputation.saving import SavingHooks, hooks_around


class WeightGradients:
    """Deferred weight gradients of the packs of one stage, in the order of their backward passes."""

    running: "ClassVar[WeightGradients | None]" = None
    """Those to which the layer that runs forward defers; None where it computes its own at once."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        """Defer those of linear layers in `layers` that train. Modules and parameters stay the same objects."""
        self._packs: deque[list[_Product]] = deque()
        for layer in layers:
            for module in layer.modules():
                # A class of its own may compute something else.
                if type(module) is nn.Linear and module.weight.requires_grad:
                    module.__class__ = _DeferringLinear

    def run(self, _: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor) -> torch.Tensor:
        """Return the states after a layer whose weight gradients are deferred, as a `RunLayer` does.

        Layers that run again in their backward pass compute them at once: their inputs would have to be kept.
        """
        WeightGradients.running = self
        try:
            return run(states)
        finally:
            WeightGradients.running = None

    def begin_pack(self) -> None:
        """Defer to a further pack what the next backward pass leaves."""
        self._packs.append([])

    def defer(self, product: "_Product") -> None:
        self._packs[-1].append(product)

    @torch.no_grad()
    def compute(self) -> None:
        """Add the deferred gradients of the oldest pack to those of the weights."""
        products = self._packs.popleft()
        while products:  # so that each is free once it is computed
            products.pop().compute()


class _Product(NamedTuple):
    """The input and the gradient of the output of a linear layer, held as the memory meter wants."""

    states: Any
    gradient: Any
    hooks: SavingHooks
    weight: nn.Parameter
    bias: nn.Parameter | None

    def compute(self) -> None:
        rows, states = (self.hooks.unpack(held).flatten(0, -2) for held in (self.gradient, self.states))
        # As the gradient of the leaf itself, so that hooks on it run as in any backward pass.
        torch.autograd.backward(self.weight, rows.T @ states)
        if self.bias is not None:
            torch.autograd.backward(self.bias, rows.sum(0))


class _LinearOfStates(torch.autograd.Function):
    """A linear layer whose backward pass computes the gradient of its input alone."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, deferred: WeightGradients
    ) -> torch.Tensor:
        ctx.save_for_backward(states, weight)
        ctx.weight, ctx.deferred = weight, deferred
        ctx.bias = bias if bias is not None and bias.requires_grad else None
        return linear(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        states, weight = ctx.saved_tensors
        (gradient,), hooks = gradients, hooks_around()
        held = hooks.pack(states), hooks.pack(gradient)
        ctx.deferred.defer(_Product(*held, hooks, ctx.weight, ctx.bias))
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None, None


class _DeferringLinear(nn.Linear):
    """A linear layer whose weight gradients are deferred where its layer says so."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (torch's name)
        deferred = WeightGradients.running
        if deferred is None or not torch.is_grad_enabled():
            return super().forward(input)
        output: torch.Tensor = _LinearOfStates.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, deferred
        )
        return output
