"""Trained and frozen parameters of a model."""

from collections.abc import Iterable

from torch import nn
from transformers import PreTrainedModel

from trials.errors import ModelError
from trials.job import PARTS, TrainingSection
from trials.model.paths import parameters_at
from trials.model.skeleton import Chain, Skeleton


def choose_trained(skeleton: Skeleton, training: TrainingSection) -> None:
    """Add the adapters of the job, and set `requires_grad` of every parameter: False where it is frozen.

    Raise ModelError for adapters that do not fit the model, and where nothing is left to train.
    """
    chain, model = skeleton.chain, skeleton.model
    if training.lora.rank:
        # Here, because peft takes a second to import.
        from trials.model.adapters import add_adapters  # noqa: PLC0415

        add_adapters(skeleton, training.lora)
    for mode, paths in (("frozen", chain.unused), *((training.mode_of(part), chain.paths_of(part)) for part in PARTS)):
        if mode == "adapters":  # where peft has frozen all else
            continue
        for _, parameter in (each for path in paths for each in parameters_at(model, path)):
            parameter.requires_grad_(mode == "whole")
    if not trains(model, chain.parts):
        raise ModelError(
            f"training.freeze: {', '.join(training.freeze)} leaves nothing of the model to train; remove a part"
        )


def draw_trained(model: PreTrainedModel, paths: Iterable[str], training: TrainingSection) -> None:
    """Draw the weights under `paths` that the job adds to the model."""
    if training.lora.rank:
        from trials.model.adapters import draw_adapters  # noqa: PLC0415

        draw_adapters(model, paths, training.seed)


def trains(model: nn.Module, paths: Iterable[str]) -> bool:
    """Return whether a parameter under one of the paths is trained."""
    return any(parameter.requires_grad for path in paths for _, parameter in parameters_at(model, path))


def highest_learning_rate(training: TrainingSection, chain: Chain) -> float:
    """Return the highest learning rate of the parts that are trained, before the schedule."""
    parts = (part for part in PARTS if chain.paths_of(part) and training.mode_of(part) != "frozen")
    return max(map(training.learning_rate_of, parts))


def trained_parts(training: TrainingSection, chain: Chain) -> str | None:
    """Return the trained parts as text, for the model's fingerprint; None where the whole model is trained."""
    modes = {part: training.mode_of(part) for part in PARTS if chain.paths_of(part)}
    if set(modes.values()) == {"whole"}:
        return None
    lora = training.lora
    targets = ", ".join(sorted(lora.targets)) if lora.targets else "all linear layers"
    described = {"whole": "", "adapters": f" with LoRA of rank {lora.rank} on {targets}"}
    return "; ".join(f"{part}{described[mode]}" for part, mode in modes.items() if mode != "frozen")
