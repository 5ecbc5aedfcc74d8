"""Causal language models of text alone, such as Llama, Qwen3 or Gemma 3's text models."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from trials.data.records.sample import NO_GRIDS
from trials.data.tokens import PackTokens
from trials.model import decoder
from trials.model.family import Images, LayerRunner, VisionModules
from trials.model.inputs.chat_encoder import chat_encoder
from trials.model.inputs.positions import counted_positions
from trials.model.inputs.text_processor import NoImages, load_text_processor
from trials.model.refusals.heads import check_heads
from trials.model.refusals.structure import of_class
from trials.model.refusals.unsupported import reason

AUTO_MODEL = AutoModelForCausalLM
language_runner = decoder.language_runner
positions = counted_positions
OTHER_FORMS: dict[str, str] = {}


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is a causal language model without parts, whose tokens see earlier tokens only."""
    is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and getattr(config, "is_decoder", True)
    return is_causal and not config.sub_configs and reason(config) is None and of_class(config) is None


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for heads that do not divide."""
    check_heads(config, "language")


def unit_flops(config: PretrainedConfig, *, tower: int, projector: int) -> float:
    """Return 0: a unit has no values."""
    return 0.0


def random_images(config: PretrainedConfig, units: int) -> Images:
    """Return units without values, which no token shows."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return Images(pixels=torch.zeros(units, 0), grids=torch.from_numpy(NO_GRIDS), input_ids=nothing)


def model_inputs(config: PretrainedConfig, input_ids: torch.Tensor, images: Images | None) -> dict[str, Any]:
    """Return the tokens."""
    return {"input_ids": input_ids[None]}


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave the configuration as it is: it has no vision side."""


encoder = functools.partial(chat_encoder, inputs=NoImages, positions=positions, load=load_text_processor)


def vision_modules(model: PreTrainedModel) -> VisionModules:
    """Return no modules."""
    return VisionModules()


def embed_vision(model: PreTrainedModel, pixels: torch.Tensor, tokens: PackTokens) -> torch.Tensor:
    """Return the units as they are."""
    return pixels


def vision_runner(model: PreTrainedModel, states: torch.Tensor, tokens: PackTokens) -> LayerRunner:
    """Return what runs no layer."""
    return lambda _layer, _number, states: states


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return no features."""
    return ()
