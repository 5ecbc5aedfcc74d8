"""The model's layers and analytic cost, from its configuration alone."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trials.job import ModelSection, TrainingSection
from trials.model.hub import published_name
from trials.model.identity import config_digest
from trials.model.paths import parameters_at
from trials.model.refusals.experts import count_used_parameters
from trials.model.skeleton import build_skeleton, count_parameters, load_config, load_with_note
from trials.model.trained import choose_trained, trained_parts
from trials.model.weights import WeightFiles
from trials.workload import COMPILER, GRADIENT_DTYPE, ModelShape, Part

_log = logging.getLogger(__name__)
_WHOLE = TrainingSection()
"""Settings with which the whole model trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterCounts:
    """Numbers of parameters."""

    parts: Mapping[Part, int]
    """Those of each part that the model has; word embedding and head are of the language model.

    Layers of vision that nothing runs count as vision.
    """
    every: int
    """Those that a plan holds, with the adapters of the job: all but those of layers that nothing runs."""
    frozen: int
    """Those of `every` that do not train."""


def count_of_job(settings: ModelSection, training: TrainingSection) -> ParameterCounts:
    """Count the parameters of a job's model, and those that it does not train."""
    config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
    skeleton = build_skeleton(config, getattr(torch, settings.dtype))
    model, chain = skeleton.model, skeleton.chain
    vision = count_parameters(model, (*chain.paths_of("vision"), *chain.unused))
    projector = count_parameters(model, chain.paths_of("projector"))
    language = sum(each.numel() for each in model.parameters()) - vision - projector
    parts: dict[Part, int] = {"vision": vision, "projector": projector, "language": language}
    choose_trained(skeleton, training)
    idle = {id(each) for path in chain.unused for _, each in parameters_at(model, path)}
    held = [each for each in model.parameters() if id(each) not in idle]
    return ParameterCounts(
        parts={part: count for part, count in parts.items() if count},
        every=sum(each.numel() for each in held),
        frozen=sum(each.numel() for each in held if not each.requires_grad),
    )


def model_shape(settings: ModelSection, training: TrainingSection = _WHOLE) -> ModelShape:
    """Describe the model of a job and what of it trains. Raise ModelError when it, or its weights, cannot be used.

    A warning says so where the configuration is wrong, or not clear, about the output projection.

    A matrix of n parameters costs 2 n operations per token, that of the head per target (Megatron-LM, appendix); of
    experts those that are chosen.
    """
    config, note = load_with_note(settings.path, trust_remote_code=settings.trust_remote_code)
    skeleton = build_skeleton(config, getattr(torch, settings.dtype))
    if settings.weights == "pretrained":
        WeightFiles(Path(settings.path), skeleton).check()
    if note is not None:
        _log.warning("%s", note)
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
