"""Qwen2-VL: native resolution, with attention inside each image in all vision layers."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from trials.arrays import Ints
from trials.data.tokens import PackTokens
from trials.model import decoder
from trials.model.inputs.patched_videos import QWEN2
from trials.model.towers import merged_patches
from trials.model.towers.merged_patches import (
    check_patches,
    check_sections,
    check_towers,
    embed_patches,
    patch_encoder,
    placed,
    shrink_patches,
)

AUTO_MODEL = AutoModelForImageTextToText
language_runner = decoder.language_runner
model_inputs = merged_patches.model_inputs
random_images = merged_patches.random_images
unit_flops = merged_patches.unit_flops
vision_modules = merged_patches.vision_modules
vision_runner = merged_patches.vision_runner
OTHER_FORMS: dict[str, str] = {}


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is Qwen2-VL."""
    return bool(config.model_type == "qwen2_vl")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for sizes that do not divide."""
    check_patches(config)
    check_towers(config, width="embed_dim", output="hidden_size")
    check_sections(config)


def positions(config: PretrainedConfig, input_ids: Ints, grids: Ints, seconds: Sequence[float] | None = None) -> Ints:
    """Implement `Family.positions`: layers of frames count one by one."""
    return placed(config, input_ids, grids, [1.0] * len(grids))


encoder = functools.partial(patch_encoder, positions=positions, rules=QWEN2)


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave `layers` layers with two heads."""
    shrink_patches(settings, layers, width="embed_dim", output="hidden_size")


def embed_vision(model: PreTrainedModel, pixels: torch.Tensor, tokens: PackTokens) -> torch.Tensor:
    """Return vision states [patches, hidden] of pixels [units, merged patches, values]."""
    return embed_patches(model, pixels)


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return features [merged patches, hidden]."""
    return (model.model.visual.merger(states[0]),)
