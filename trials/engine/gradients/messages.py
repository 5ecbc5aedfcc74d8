"""Gradients as ranks send them: in float32, zeros where a rank has none, and several in one message."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from deepspeed import comm
from torch import nn

from trials.engine.static_memory import BUCKET
from trials.model.stage import StageModule


def float_buffers(engine: Any) -> Mapping[nn.Parameter, torch.Tensor]:
    """Return DeepSpeed's own float32 gradients of bfloat16 weights with ZeRO 1; nothing for other weights."""
    wrapper = engine.optimizer
    if not hasattr(wrapper, "fp32_groups_gradients"):
        return {}
    return dict(zip(chain(*wrapper.bf16_groups), chain(*wrapper.fp32_groups_gradients), strict=True))


def gradient_of(parameter: nn.Parameter, buffers: Mapping[nn.Parameter, torch.Tensor]) -> torch.Tensor:
    """Return the float32 gradient, zeros where this rank has none: another one may have one."""
    if parameter in buffers:
        return buffers[parameter]
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def in_buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield consecutive gradients that make up one message; large ones alone, so that they are not copied."""
    bucket: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and size + gradient.numel() > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel()
    if bucket:
        yield bucket


def sum_gradients(engine: Any, stage: StageModule) -> None:
    """Sum the gradients of parameters that every tensor rank holds whole, before data ranks average theirs.

    Each tensor rank has the part of its own tokens. Every rank must call it.
    """
    if stage.tensor.group is None:
        return
    buffers = float_buffers(engine)
    replicas = [each for each in stage.parameters() if each.requires_grad and each not in stage.slices]
    for bucket in in_buckets(gradient_of(each, buffers) for each in replicas):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            comm.all_reduce(bucket[0], group=stage.tensor.group)
            continue
        joined = torch.cat([each.flatten() for each in bucket])
        comm.all_reduce(joined, group=stage.tensor.group)
        for each, part in zip(bucket, joined.split([each.numel() for each in bucket]), strict=True):
            each.copy_(part.view_as(each))
