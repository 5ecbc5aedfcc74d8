"""The optimizer of a stage: AdamW with a learning rate and a weight decay for each group of parameters."""

from collections import defaultdict

import torch
from torch import nn

from trials.job import TrainingSection
from trials.model.paths import parameters_at
from trials.model.stage import StageModule

_PEAK = "initial_lr"
"""Key of a group's learning rate before the schedule; torch's own schedulers use the same."""


def build_optimizer(stage: StageModule, training: TrainingSection) -> torch.optim.AdamW:
    """Build AdamW over the parameters of this stage.

    Parameters with the same learning rate and weight decay are one group, so no group is empty. Norms, biases and other
    parameters with fewer than two dimensions have no weight decay.
    """
    rate_of = _learning_rates(stage, training)
    groups: defaultdict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in stage.named_parameters():
        # The biases of experts are a matrix.
        decays = parameter.ndim > 1 and not name.endswith("bias")
        decay = training.weight_decay if decays else 0.0
        groups[rate_of.get(parameter, training.learning_rate_of("language")), decay].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "lr": rate, _PEAK: rate, "weight_decay": decay}
            for (rate, decay), parameters in groups.items()
        ],
        betas=training.betas,
    )


def scale_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every group to `factor` times its configured one."""
    for group in optimizer.param_groups:
        group["lr"] = group[_PEAK] * factor


def _learning_rates(stage: StageModule, training: TrainingSection) -> dict[nn.Parameter, float]:
    """Return the learning rates of this stage's vision tower and projector. All other parameters are language."""
    chain = stage.chain
    # The word embedding, last of the projector's paths, belongs to the language model.
    parts = dict.fromkeys((*chain.vision_embedding, *chain.vision_layers), training.learning_rate_of("vision"))
    parts |= dict.fromkeys(chain.projector[:-1], training.learning_rate_of("projector"))
    return {
        parameter: parts[path]
        for path in stage.paths
        if path in parts
        for _, parameter in parameters_at(stage.model, path)
    }
