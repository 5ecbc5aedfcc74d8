"""Corrections of the gradient norm by which DeepSpeed clips, so that it is the norm over the whole model."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import nn

from trials.model.stage import StageModule


def count_in_norm(stage: StageModule, copy: nn.Parameter | None = None) -> None:
    """Mark a stage's parameters so that the norm over all ranks of a pipeline has each of them, or slice, once.

    `copy` is this stage's second copy of a tied weight, which does not count.
    """
    first = stage.tensor.share.index == 0
    parameters: Iterable[Any] = stage.parameters()
    for parameter in parameters:
        # Without this mark ZeRO 0 counts the first rank alone: it takes others for ranks with the same parameters.
        parameter.model_parallel = parameter is not copy and (first or parameter in stage.slices)
        parameter.ds_pipe_replicated = parameter is copy


def join_norms(wrapper: Any) -> None:
    """Correct the norm of DeepSpeed's optimizer for ZeRO 1 and 2, or of that for bfloat16, where `wrapper` is one.

    The first takes one norm for each parameter group, with the other stages, and never ends where these have another
    number of groups. The second fails on a tensor rank of which no gradient counts, as in a stage without slices.
    """
    # A proxy, because a reference to itself would keep the optimizer in memory after its engine is closed.
    if hasattr(wrapper, "params_in_partition"):
        wrapper.scaled_global_norm = partial(_norm, weakref.proxy(wrapper))
    if isinstance(wrapper, BF16_Optimizer):
        wrapper.get_grads_for_norm = partial(_counted_gradients, weakref.proxy(wrapper))


def _norm(wrapper: Any) -> torch.Tensor:
    groups = range(len(wrapper.bit16_groups))
    gradients = [gradient for group in groups for gradient in wrapper.averaged_gradients[group]]
    parameters = [parameter for group in groups for parameter in wrapper.params_in_partition[group]]
    norm: torch.Tensor = wrapper.get_grad_norm_direct(gradients, parameters)
    return norm


def _counted_gradients(wrapper: Any, for_clipping: bool = False) -> Any:
    found = BF16_Optimizer.get_grads_for_norm(wrapper, for_clipping)
    if for_clipping or found[0]:
        return found
    nothing = torch.zeros(1, device=wrapper.fp32_groups_flat_partition[0].device)
    return [nothing], *found[1:]
