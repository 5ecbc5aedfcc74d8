"""The model's layers and analytic cost, from its configuration alone."""

from pathlib import Path

import torch

from trials.data.epoch import CostWeights
from trials.job import ModelSection, TrainingSection
from trials.model.hub import published_name
from trials.model.identity import config_digest
from trials.model.refusals.experts import count_used_parameters
from trials.model.skeleton import build_skeleton, count_parameters, load_config
from trials.model.trained import choose_trained, passes, trained_parts
from trials.model.weights import WeightFiles
from trials.workload import COMPILER, GRADIENT_DTYPE, ModelShape, Part

_WHOLE = TrainingSection()
"""Settings with which the whole model trains."""


def parameters_of_parts(settings: ModelSection) -> dict[Part, int]:
    """Return the parameters of each part that the model has; word embedding and head are of the language model."""
    config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
    skeleton = build_skeleton(config, getattr(torch, settings.dtype))
    model, chain = skeleton.model, skeleton.chain
    vision = count_parameters(model, (*chain.vision_embedding, *chain.vision_layers))
    projector = count_parameters(model, chain.projector[:-1])
    every = sum(parameter.numel() for parameter in model.parameters())
    found: dict[Part, int] = {"vision": vision, "projector": projector, "language": every - vision - projector}
    return {part: count for part, count in found.items() if count}


def model_shape(settings: ModelSection, training: TrainingSection = _WHOLE) -> ModelShape:
    """Describe the model of a job and what of it trains. Raise ModelError when it, or its weights, cannot be used.

    A matrix of n parameters costs 2 n operations per token, that of the head per target (Megatron-LM, appendix); of
    experts those that are chosen.
    """
    config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
    skeleton = build_skeleton(config, getattr(torch, settings.dtype))
    if settings.weights == "pretrained":
        WeightFiles(Path(settings.path), skeleton).check()
    chain, language_layers = skeleton.chain, len(skeleton.chain.language_layers)
    # The word embedding, last of the projector's paths, is a table: looking up costs no operations.
    tower, projector = (
        count_parameters(skeleton.model, paths)
        for paths in ((*chain.vision_embedding, *chain.vision_layers), chain.projector[:-1])
    )
    language, head = (
        count_used_parameters(skeleton.model, paths, config.get_text_config())
        for paths in (chain.language_layers, chain.head)
    )
    parameters = sum(parameter.numel() for parameter in skeleton.model.parameters())
    choose_trained(skeleton, training)
    return ModelShape(
        name=Path(published_name(settings.path)).name,
        family=config.model_type,
        dtype=settings.dtype,
        vision_layers=len(chain.vision_layers),
        language_layers=language_layers,
        parameters=parameters,
        unit_flops=skeleton.family.unit_flops(config, tower=tower, projector=projector),
        token_flops=2 * language,
        square_flops=float(2 * language_layers * config.get_text_config().hidden_size),
        config_digest=config_digest(config),
        gradient_dtype=None if settings.dtype == GRADIENT_DTYPE else GRADIENT_DTYPE,
        trained=trained_parts(training, chain),
        compiler=COMPILER if training.compile else None,
        target_flops=2 * head,
    )


def cost_weights(shape: ModelShape, training: TrainingSection = _WHOLE) -> CostWeights:
    """Return the analytic cost by which packs are matched, so that every machine matches them alike."""
    # Both passes, in units of the three that a matrix takes whose weights train.
    vision, language = passes(training, "vision") / 3, passes(training, "language") / 3
    return CostWeights(
        unit=vision * shape.unit_flops,
        token=language * shape.token_flops,
        target=language * shape.target_flops,
        square=language * shape.square_flops,
    )
