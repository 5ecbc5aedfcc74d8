"""The optimizer of a stage: AdamW with a learning rate and a weight decay for each group of parameters."""

from collections import defaultdict

import torch
from torch import nn

from trials.engine.frozen_stages import idle_parameter
from trials.job import PARTS, TrainingSection
from trials.model.paths import parameters_at
from trials.model.stage import StageModule

_PEAK = "initial_lr"
"""Key of a group's learning rate before the schedule; torch's own schedulers use the same."""


def build_optimizer(stage: StageModule, training: TrainingSection) -> torch.optim.AdamW:
    """Build AdamW over the parameters of this stage that train; an update is one kernel for many parameters.

    Parameters with the same learning rate and weight decay are one group, so no group is empty. Norms, biases and other
    parameters with fewer than two dimensions have no weight decay.
    """
    rate_of = _learning_rates(stage, training)
    groups: defaultdict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in stage.named_parameters():
        if not parameter.requires_grad:
            continue
        # The biases of experts are a matrix.
        decays = parameter.dim() > 1 and not name.endswith("bias")
        decay = training.weight_decay if decays else 0.0
        groups[rate_of[parameter], decay].append(parameter)
    if not groups:
        groups[training.learning_rate, 0.0].append(idle_parameter(stage))
    return torch.optim.AdamW(
        [
            {"params": parameters, "lr": rate, _PEAK: rate, "weight_decay": decay}
            for (rate, decay), parameters in groups.items()
        ],
        betas=training.betas,
        fused=True,
    )


def scale_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every group to `factor` times its configured one."""
    for group in optimizer.param_groups:
        group["lr"] = group[_PEAK] * factor


def _learning_rates(stage: StageModule, training: TrainingSection) -> dict[nn.Parameter, float]:
    """Return the learning rate of every parameter of this stage."""
    rates = {path: training.learning_rate_of(part) for part in PARTS for path in stage.chain.paths_of(part)}
    return {parameter: rates[path] for path in stage.paths for _, parameter in parameters_at(stage.model, path)}
