"""Faults of gradients and of the loss that only some models or references show, which a certificate must name."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np

from tests.machines.planted.writing import other_alpha
from trials.data import loader, loss_weights
from trials.engine import base
from trials.model.stage import StageModule
from trials.tasks import session

Fault = Callable[[], AbstractContextManager[Any]]


def _scaled_gradients(names: str, factor: float) -> AbstractContextManager[Any]:
    """Multiply the gradients of the parameters whose names have this."""
    build = session.build_stage

    def built(*arguments: Any, **how: Any) -> StageModule:
        stage = build(*arguments, **how)
        for name, each in stage.model.named_parameters():
            if each.requires_grad and names in name:
                each.register_hook(lambda gradient: gradient * factor)
        return stage

    return patch.object(session, "build_stage", built)


def another_scale() -> AbstractContextManager[Any]:
    """Divide the loss of a step by half of its weight."""
    step = base.OneStage.step
    return patch.object(
        base.OneStage, "step", lambda self, batches, count, weight: step(self, batches, count, weight / 2)
    )


def unweighted_samples() -> AbstractContextManager[Any]:
    """Give every target of a pack the same weight, where the job weighs samples."""
    return patch.object(loader, "_weights", lambda labels, _: np.ones(sum(map(len, labels)), np.float32))


def other_weighting() -> AbstractContextManager[Any]:
    """Define the weight of samples by the square roots of their targets as that of their targets."""
    return patch.dict(loss_weights._POWERS, {"square": 1.0})


KEY_FAULTS: Mapping[str, Fault] = {
    "none": nullcontext,
    "gradients of keys lost": partial(_scaled_gradients, "k_proj", 0.0),
}
ADAPTER_FAULTS: Mapping[str, Fault] = {
    "none": nullcontext,
    "gradients of A lost": partial(_scaled_gradients, ".lora_A.", 0.0),
    "gradients of A negated": partial(_scaled_gradients, ".lora_A.", -1.0),
    "another alpha written": other_alpha,
}
"""These and those of keys in bfloat16, where the gradient of a parameter is small next to the rounding of its part."""
STAGE_FAULTS: Mapping[str, Fault] = {
    "none": nullcontext,
    "another scale": another_scale,
    "samples not weighted": unweighted_samples,
    "another weighting": other_weighting,
}
"""With the reference of the plan's own stages, which have the same engine."""
