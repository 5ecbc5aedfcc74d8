"""The model's layers and analytic cost, from its configuration alone."""

from pathlib import Path

import torch

from trials.data.epoch import CostWeights
from trials.job import ModelSection
from trials.model.identity import config_digest
from trials.model.skeleton import Skeleton, build_skeleton, load_config
from trials.model.weights import WeightFiles
from trials.workload import GRADIENT_DTYPE, ModelShape


def model_shape(settings: ModelSection) -> ModelShape:
    """Describes the model of a job. Raises ModelError when it, or its weights, cannot be used."""
    config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
    skeleton = build_skeleton(config, getattr(torch, settings.dtype))
    if settings.weights == "pretrained":
        WeightFiles(Path(settings.path), skeleton).check()
    chain, count = skeleton.chain, _Counter(skeleton)
    vision_tokens, image_tokens = skeleton.family.unit_tokens(config)
    vision_hidden = config.vision_config.hidden_size
    text = config.get_text_config()
    vision_layers, language_layers = len(chain.vision_layers), len(chain.language_layers)
    tower = count(*chain.vision_embedding, *chain.vision_layers)
    return ModelShape(
        name=Path(settings.path).name,
        family=config.model_type,
        dtype=settings.dtype,
        vision_layers=vision_layers,
        language_layers=language_layers,
        parameters=sum(parameter.numel() for parameter in skeleton.model.parameters()),
        unit_flops=float(
            2 * tower * vision_tokens
            + 4 * vision_layers * vision_tokens**2 * vision_hidden
            + 2 * count(*chain.projector[:-1]) * image_tokens
        ),
        token_flops=float(2 * count(*chain.language_layers, *chain.head)),
        square_flops=float(2 * language_layers * text.hidden_size),
        config_digest=config_digest(config),
        gradient_dtype=None if settings.dtype == GRADIENT_DTYPE else GRADIENT_DTYPE,
    )


def cost_weights(shape: ModelShape) -> CostWeights:
    """By which packs are matched: the analytic cost, so that every machine matches them alike."""
    return CostWeights(unit=shape.unit_flops, token=shape.token_flops, square=shape.square_flops)


class _Counter:
    """Parameters under some paths; a matrix of n parameters costs 2 n operations per token (Megatron-LM, appendix)."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._model = skeleton.model

    def __call__(self, *paths: str) -> int:
        return sum(parameter.numel() for path in paths for parameter in self._model.get_submodule(path).parameters())
