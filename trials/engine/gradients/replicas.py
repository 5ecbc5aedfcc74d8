"""Gradients of the parameters that every tensor rank holds whole. Each rank has the part of its own tokens."""

from typing import Any

import torch
from deepspeed import comm

from trials.engine.gradients.messages import float_buffers, gradient_of, in_buckets
from trials.model.stage import StageModule


def sum_gradients(engine: Any, stage: StageModule) -> None:
    """Sum these gradients over the tensor ranks, before data ranks average theirs. Every rank must call it."""
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
