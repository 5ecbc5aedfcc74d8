"""Whole float32 weights and AdamW moments of single parameters, under every ZeRO stage."""

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed import comm
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_optimizer_state
from deepspeed.utils import safe_set_full_fp32_param as set_master_weight
from torch import nn

from trials.model.stage import StageModule

WEIGHT = "weight"
MOMENTS = ("exp_avg", "exp_avg_sq")
PARTS = (WEIGHT, *MOMENTS)


def kept(tensors: Iterable[tuple[str, torch.Tensor]], *, keeps: bool) -> dict[str, torch.Tensor]:
    """Take all tensors, one after the other, and return them on a rank that keeps them; nothing on others.

    The ranks of a stage have to read its tensors together, and one of them uses them. If each kept them, a machine
    would need memory for a stage as often as it has ranks of it.
    """
    return {name: tensor for name, tensor in tensors if keeps}


class OptimizerState:
    """The optimizer state of one rank's stage, to read and write parameter by parameter.

    With ZeRO above 0 each access is a collective of the data-parallel group, and reading a slice one of the tensor
    ranks, so all ranks of a stage must access the parameters in the same order.
    """

    def __init__(self, wrapper: Any, optimizer: torch.optim.Optimizer, stage: StageModule) -> None:
        """Access the state of DeepSpeed's `wrapper` of the torch `optimizer` for the `stage`, or of that itself."""
        self._wrapper = wrapper
        self._optimizer = optimizer
        self._tensor, self._slices = stage.tensor, stage.slices
        self._is_connected = False

    def read(self, parameter: nn.Parameter, part: str) -> torch.Tensor:
        """Return the whole `part` of the parameter, in the model's shape. Moments exist after the first step."""
        held = self._read(parameter, part)
        if parameter not in self._slices:
            return held
        return self._tensor.joined_slices(held, self._slices[parameter])

    def _read(self, parameter: nn.Parameter, part: str) -> torch.Tensor:
        """Return what the ranks with this slice of the parameter hold."""
        if part != WEIGHT:
            self._connect()
        if not self._is_split(parameter):
            tensor: torch.Tensor = parameter.detach() if part == WEIGHT else self._optimizer.state[parameter][part]
            return tensor
        if not parameter.requires_grad:  # which ZeRO 3 splits too, without an optimizer state
            return _joined_shares(parameter)
        whole: torch.Tensor = (
            safe_get_full_fp32_param(parameter) if part == WEIGHT else safe_get_full_optimizer_state(parameter, part)
        )
        return whole

    def working(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the whole weight with which the model computes, of which the optimizer may hold a float32 form."""
        if hasattr(parameter, "ds_id"):
            with GatheredParameters(parameter):
                held = parameter.detach().clone()
        else:
            held = parameter.detach()
        return held if parameter not in self._slices else self._tensor.joined_slices(held, self._slices[parameter])

    @property
    def rates(self) -> frozenset[tuple[float, float]]:
        """(learning rate, weight decay) of each group of the last step."""
        return frozenset((float(group["lr"]), group["weight_decay"]) for group in self._optimizer.param_groups)

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, part: str, value: torch.Tensor) -> None:
        """Set the whole `part` of the parameter. Call `begin_writing` first."""
        if parameter in self._slices:
            value = self._tensor.slice_of(value, self._slices[parameter])
        self._write(parameter, part, value)

    def _write(self, parameter: nn.Parameter, part: str, value: torch.Tensor) -> None:
        """Set what the ranks with this slice of the parameter hold."""
        if part == WEIGHT:
            with GatheredParameters(parameter, modifier_rank=0):
                parameter.copy_(value)
        if hasattr(parameter, "ds_id"):
            # All shares under ZeRO 3 have one size, so the last may be padded, on which DeepSpeed's own setter fails.
            share, _ = self._wrapper._get_fp32_opt_state_partition(parameter, False, None if part == WEIGHT else part)
            start = self._wrapper._get_param_partition_rank(parameter) * share.numel()
            own = value.flatten()[start : start + share.numel()]
            share[: own.numel()].copy_(own)
        elif part == WEIGHT:
            set_master_weight(parameter, value)
        elif self._is_split(parameter):
            safe_set_full_optimizer_state(parameter, value, part)
        else:
            self._optimizer.state[parameter][part].copy_(value)

    def begin_writing(self, steps: int) -> None:
        """Create the moments, as AdamW does in its first step, and set its step count to `steps`."""
        tensors = [tensor for group in self._optimizer.param_groups for tensor in group["params"]]
        is_fused = self._optimizer.defaults["fused"]
        # ZeRO 3 gives the optimizer its tensors only while it steps.
        for tensor in getattr(self._wrapper, "fp32_partitioned_groups_flat", tensors):
            moments = {name: torch.zeros_like(tensor, dtype=torch.float32) for name in MOMENTS}
            # Where AdamW itself creates it.
            counted = torch.full((), float(steps), device=tensor.device if is_fused else "cpu")
            self._optimizer.state[tensor] = {"step": counted, **moments}
        self._connect()

    def _connect(self) -> None:
        """Connect parameters with their moments, which must exist, under ZeRO 1 and 2."""
        # DeepSpeed connects them after the first group's first update, when other groups have no moments yet.
        if not self._is_connected and hasattr(self._wrapper, "_hp_optimizer_states_linked"):
            self._wrapper._hp_optimizer_states_linked = False
            self._wrapper._lazy_init_hp_params_optimizer_state()
        self._is_connected = True

    @staticmethod
    def _is_split(parameter: nn.Parameter) -> bool:
        return hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id")


def _joined_shares(parameter: Any) -> torch.Tensor:
    """Return the whole of a weight that ZeRO 3 splits, from the shares of the ranks.

    DeepSpeed's own gathering fails on a weight that it has begun to gather for a backward pass, as it does for frozen
    layers whose pass then ends before them.
    """
    share, group = parameter.ds_tensor, parameter.ds_process_group
    whole = share.new_empty(share.numel() * comm.get_world_size(group))
    comm.all_gather_into_tensor(whole, share, group=group)
    found: torch.Tensor = whole[: parameter.ds_numel].view(
        parameter.ds_shape
    )  # shares have one size: the last is padded
    return found
