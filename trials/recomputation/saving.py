"""Hooks on the tensors that autograd saves, of which inner ones can pass tensors on to those around them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks


class SavingHooks(NamedTuple):
    """A pair of hooks, as `saved_tensors_hooks` takes them."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StorageView:
    """What of a storage a strided tensor shows."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "StorageView":
        return cls(
            dtype=tensor.dtype,
            device=tensor.device,
            size=tensor.size(),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor that shows the same of another storage on the same device."""
        tensor: torch.Tensor = torch.empty(0, dtype=self.dtype, device=self.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)


def bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    """Return a tensor of all bytes of a storage on this device, [bytes] of uint8, which shares its memory."""
    tensor: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=device)
    return tensor.set_(storage)


_NONE = SavingHooks(pack=lambda tensor: tensor, unpack=lambda tensor: tensor)
_around: list[SavingHooks] = []
"""Hooks of `saving`, from the outermost on. Autograd calls the innermost alone."""


@contextmanager
def saving(hooks: SavingHooks) -> Iterator[None]:
    """Return the context in which autograd saves tensors through these hooks."""
    _around.append(hooks)
    try:
        with saved_tensors_hooks(*hooks):
            yield
    finally:
        _around.pop()


def hooks_around() -> SavingHooks:
    """Return the hooks of the innermost context of `saving`; outside of any, those that leave tensors as they are."""
    return _around[-1] if _around else _NONE
