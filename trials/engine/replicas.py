"""Gradients of the parameters that every tensor rank holds whole. Each rank has the part of its own tokens."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from deepspeed import comm
from torch import nn

from trials.model.stage import StageModule

_BUCKET = 50_000_000
"""Most elements that are added up in one message: small gradients are copied together."""


def sum_gradients(engine: Any, stage: StageModule) -> None:
    """Sum these gradients over the tensor ranks, before data ranks average theirs. Every rank must call it."""
    if stage.tensor.group is None:
        return
    replicas = [each for each in stage.parameters() if each.requires_grad and each not in stage.slices]
    for bucket in _buckets(_gradients(engine, replicas)):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            comm.all_reduce(bucket[0], group=stage.tensor.group)
            continue
        joined = torch.cat([each.flatten() for each in bucket])
        comm.all_reduce(joined, group=stage.tensor.group)
        for each, part in zip(bucket, joined.split([each.numel() for each in bucket]), strict=True):
            each.copy_(part.view_as(each))


def _gradients(engine: Any, parameters: Iterable[nn.Parameter]) -> Iterator[torch.Tensor]:
    """Yield the float32 gradient of each parameter, zeros where this rank has none: another one may have one."""
    wrapper = engine.optimizer
    if hasattr(wrapper, "fp32_groups_gradients"):  # its own buffers, for bfloat16 weights
        buffers = dict(zip(chain(*wrapper.bf16_groups), chain(*wrapper.fp32_groups_gradients), strict=True))
        yield from (buffers[each] for each in parameters)
        return
    for each in parameters:
        if each.grad is None:
            each.grad = torch.zeros_like(each)
        yield each.grad


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield consecutive gradients that make up one message; large ones alone, so that they are not copied."""
    bucket: list[torch.Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and size + gradient.numel() > _BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel()
    if bucket:
        yield bucket
