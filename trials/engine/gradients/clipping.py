"""Corrections of the gradient norm by which DeepSpeed clips, so that it is the norm over the whole model."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
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
    """Make DeepSpeed's optimizer for ZeRO 1 and 2, where `wrapper` is that, take one norm over all parameter groups.

    Its own takes one for each group, with the other stages, and never ends where these have another number of groups.
    """
    if hasattr(wrapper, "params_in_partition"):
        # A proxy, because a reference to itself would keep the optimizer in memory after its engine is closed.
        wrapper.scaled_global_norm = partial(_norm, weakref.proxy(wrapper))


def _norm(wrapper: Any) -> torch.Tensor:
    groups = range(len(wrapper.bit16_groups))
    gradients = [gradient for group in groups for gradient in wrapper.averaged_gradients[group]]
    parameters = [parameter for group in groups for parameter in wrapper.params_in_partition[group]]
    norm: torch.Tensor = wrapper.get_grad_norm_direct(gradients, parameters)
    return norm
