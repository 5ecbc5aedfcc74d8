"""Weights and updates of the plain packed loop in several precisions. Imports nothing from autotune."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, TypeAlias

import torch
from torch import nn

Precision: TypeAlias = Literal["float32", "autocast", "bfloat16"]
"""All in float32; float32 weights that are rounded where they are used; or bfloat16 weights and gradients, with float32
copies of the weights that the optimizer updates."""


def dtype_of(precision: Precision) -> torch.dtype:
    """Return the type of the model's weights."""
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def rounding(precision: Precision, device: str) -> AbstractContextManager[object]:
    """Return the context of a forward pass."""
    return torch.autocast(device, torch.bfloat16) if precision == "autocast" else nullcontext()


class Optimizer:
    """AdamW of weights, or of float32 copies of them."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, learning_rate: float, weight_decay: float) -> None:
        self._weights: list[torch.Tensor] = [each for each in parameters if each.requires_grad]
        self._copies = self._weights
        if any(each.dtype != torch.float32 for each in self._weights):
            self._copies = [each.detach().float() for each in self._weights]
        self._adamw = torch.optim.AdamW(self._copies, lr=learning_rate, weight_decay=weight_decay, fused=True)

    def step(self) -> None:
        """Update the weights, and drop their gradients."""
        if self._copies is self._weights:
            self._adamw.step()
        else:
            for copy, weight in zip(self._copies, self._weights, strict=True):
                copy.grad = None if weight.grad is None else weight.grad.float()
                weight.grad = None
            self._adamw.step()
            with torch.no_grad():
                torch._foreach_copy_(self._weights, self._copies)
        self._adamw.zero_grad(set_to_none=True)

    def forget(self) -> None:
        """Take the weights as they are now, without moments."""
        self._adamw.state.clear()
        self._adamw.zero_grad(set_to_none=True)
        if self._copies is not self._weights:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._weights)
