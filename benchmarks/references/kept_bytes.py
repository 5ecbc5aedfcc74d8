"""Bytes of the plain packed loop: static ones, and a meter of what autograd keeps. Imports nothing from autotune."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

_STATIC, _GATHERED = 16, 8
"""Bytes of a float32 parameter: weight, gradient, and AdamW's two moments; weight and gradient alone."""


def static_bytes(model: nn.Module, layers: Sequence[nn.Module], ranks: int) -> int:
    """Return the static bytes of a rank where `ranks` hold the model in shards.

    With several of them the largest layer has its weights and gradients at once, and no other has.
    """
    static = _STATIC * sum(each.numel() for each in model.parameters() if each.requires_grad)
    if ranks == 1:
        return static
    return static // ranks + _GATHERED * max(sum(each.numel() for each in layer.parameters()) for layer in layers)


class Kept:
    """Most bytes that autograd keeps at once, by its own hooks; parameters are not counted."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._weights = {each.untyped_storage().data_ptr() for each in parameters}
        self._holders: dict[int, int] = {}
        self.live = self.most = 0

    def watch(self) -> torch.autograd.graph.saved_tensors_hooks:
        return torch.autograd.graph.saved_tensors_hooks(self._hold, lambda held: held[0])

    def _hold(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self._weights or not size:
            return tensor, None
        if not self._holders.get(place):
            self.live += size
            self.most = max(self.most, self.live)
        self._holders[place] = self._holders.get(place, 0) + 1
        return tensor, _Release(self, place, size)

    def release(self, place: int, size: int) -> None:
        self._holders[place] -= 1
        if not self._holders[place]:
            self.live -= size


class _Release:
    def __init__(self, kept: Kept, place: int, size: int) -> None:
        self._kept, self._place, self._size = kept, place, size

    def __del__(self) -> None:
        self._kept.release(self._place, self._size)
