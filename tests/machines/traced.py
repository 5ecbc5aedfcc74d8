"""Layers of this process whose graphs torch finds as in a rank, and then runs without a compiler."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from trials.model.attention.packed import PACKED_ATTENTION, packed_attention


@contextmanager
def traced(backend: str) -> Iterator[None]:
    """Let layers that are compiled in this context have a backend such as `eager` or `aot_eager`."""
    # Else layers have the graphs that this process has found for others of their class.
    torch._dynamo.reset()
    compile_module = nn.Module.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Module, "compile", lambda layer, **how: compile_module(layer, backend=backend, **how))
        try:
            yield
        finally:
            AttentionInterface.register(PACKED_ATTENTION, packed_attention)
