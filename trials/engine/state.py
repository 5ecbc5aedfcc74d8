"""Whole float32 weights and AdamW moments of single parameters, under every ZeRO stage."""

from collections.abc import Iterable
from typing import Any

import torch
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
        whole: torch.Tensor = (
            safe_get_full_fp32_param(parameter) if part == WEIGHT else safe_get_full_optimizer_state(parameter, part)
        )
        return whole

    def working(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the whole weight with which the model computes, of which the optimizer may hold a float32 form."""
        held = parameter.detach()
        return held if parameter not in self._slices else self._tensor.joined_slices(held, self._slices[parameter])

    @property
    def rates(self) -> frozenset[tuple[float, float]]:
        """(learning rate, weight decay) of each group of the last step."""
        return frozenset((float(group["lr"]), group["weight_decay"]) for group in self._optimizer.param_groups)

    @torch.no_grad()
    def write(self, parameter: nn.Parameter, part: str, value: torch.Tensor) -> None:
        """Set the whole `part` of the parameter. Call `create_moments` first."""
        if parameter in self._slices:
            value = self._tensor.slice_of(value, self._slices[parameter])
        self._write(parameter, part, value)

    def _write(self, parameter: nn.Parameter, part: str, value: torch.Tensor) -> None:
        """Set what the ranks with this slice of the parameter hold."""
        if part == WEIGHT:
            parameter.copy_(value)
            set_master_weight(parameter, value)
        elif self._is_split(parameter):
            safe_set_full_optimizer_state(parameter, value, part)
        else:
            self._optimizer.state[parameter][part].copy_(value)

    def create_moments(self, steps: int) -> None:
        """Set the moments to 0, which AdamW would create in its first step, and its step count to `steps`."""
        tensors = [tensor for group in self._optimizer.param_groups for tensor in group["params"]]
        is_fused = self._optimizer.defaults["fused"]
        for tensor in tensors:
            state = self._optimizer.state[tensor]
            for name in MOMENTS:
                # In place: a second set of moments would double their memory.
                state[name] = state[name].zero_() if name in state else torch.zeros_like(tensor, dtype=torch.float32)
            # Where AdamW itself creates it.
            state["step"] = torch.full((), float(steps), device=tensor.device if is_fused else "cpu")
        self._connect()

    def _connect(self) -> None:
        """Connect parameters with their moments, which must exist, under DeepSpeed's ZeRO 1."""
        # DeepSpeed connects them after the first group's first update, when other groups have no moments yet.
        if not self._is_connected and hasattr(self._wrapper, "_hp_optimizer_states_linked"):
            self._wrapper._hp_optimizer_states_linked = False
            self._wrapper._lazy_init_hp_params_optimizer_state()
        self._is_connected = True

    @staticmethod
    def _is_split(parameter: nn.Parameter) -> bool:
        return hasattr(parameter, "_hp_mapping")
