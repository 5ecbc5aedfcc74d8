"""Hooks on the tensors that autograd saves, of which inner ones can pass tensors on to those around them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks


class SavingHooks(NamedTuple):
    """A pair of hooks, as `saved_tensors_hooks` takes them."""

    pack: Callable[[torch.Tensor], Any]
    unpack: Callable[[Any], torch.Tensor]


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
