"""What trains: the parts of a model whose weights a training changes."""

from collections.abc import Iterable

from torch import nn

from trials.errors import ModelError
from trials.job import PARTS, Part, TrainingSection
from trials.model.paths import parameters_at
from trials.model.skeleton import Chain, Skeleton


def choose_trained(skeleton: Skeleton, training: TrainingSection) -> None:
    """Set `requires_grad` of every parameter: that of weights that stay as they are is False.

    Raise ModelError where nothing is left to train.
    """
    for path in (*skeleton.chain.unused, *(path for part in training.freeze for path in skeleton.chain.paths_of(part))):
        for _, parameter in parameters_at(skeleton.model, path):
            parameter.requires_grad_(False)
    if not trains(skeleton.model, skeleton.chain.parts):
        raise ModelError(
            f"training.freeze: {', '.join(training.freeze)} leaves nothing of the model to train; remove a part"
        )


def trains(model: nn.Module, paths: Iterable[str]) -> bool:
    """Return whether a parameter under one of the paths trains."""
    return any(parameter.requires_grad for path in paths for _, parameter in parameters_at(model, path))


def trained_parts(training: TrainingSection, chain: Chain) -> str | None:
    """Describe which parts train, as a key of measurements; None where the whole model does."""
    if not training.freeze:
        return None
    return ", ".join(part for part in PARTS if part not in training.freeze and chain.paths_of(part))


def passes(training: TrainingSection, part: Part) -> int:
    """Return the passes over a part in a step: forward, for gradients of its input, and for those of its weights."""
    if part not in training.freeze:
        return 3
    before = PARTS[: PARTS.index(part)]
    # The word embedding, before the language layers, trains with them: a frozen part has only others before it.
    return 2 if any(each not in training.freeze for each in before) else 1
