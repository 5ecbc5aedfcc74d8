"""Pipeline instructions of DeepSpeed for frozen stages, and for stages without trained ones before them."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from deepspeed.runtime.pipe import schedule
from torch import nn

from trials.engine.zero_bubble import ComputeWeightGradients
from trials.model.stage import StageModule

Instructions: TypeAlias = Mapping[type, Callable[..., None]]

_IDLE = "idle"
"""Name of the parameter that a stage without trained ones gets, because DeepSpeed needs one."""


def idle_parameter(stage: StageModule) -> nn.Parameter:
    """Give the stage a trained parameter without effect: DeepSpeed runs no stage without one."""
    stage.register_parameter(_IDLE, nn.Parameter(torch.zeros(1).to(next(stage.parameters()))))
    return stage.get_parameter(_IDLE)


def instructions_of(stage: StageModule, usual: Instructions) -> dict[type, Callable[..., None]]:
    """Return the usual instructions, without gradients and backward passes where nothing before is trained."""

    def send_and_free(engine: Any, buffer_id: int) -> None:
        usual[schedule.SendActivation](engine, buffer_id=buffer_id)
        engine.pipe_buffers["outputs"][buffer_id] = None

    def free_inputs(engine: Any, buffer_id: int) -> None:
        engine.pipe_buffers["inputs"][buffer_id] = None

    def reduce(engine: Any) -> None:
        # With no gradient at all, the norm of bfloat16 training fails.
        (0 * stage.get_parameter(_IDLE)).sum().backward()
        usual[schedule.ReduceTiedGrads](engine)

    found = dict(usual)
    if not stage.trains_before:
        found[schedule.SendGrad] = free_inputs
    if not stage.has_backward:
        found[schedule.SendActivation] = send_and_free
        found |= dict.fromkeys((schedule.RecvGrad, schedule.BackwardPass, ComputeWeightGradients), _skip)
    if hasattr(stage, _IDLE):
        found[schedule.ReduceTiedGrads] = reduce
    return found


def _skip(engine: Any, **_: Any) -> None:
    """Do nothing: there is no gradient to receive, and nothing to compute one for."""
