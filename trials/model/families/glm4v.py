"""GLM-4.1V, and GLM-4.5V with experts: native resolution, learned positions, and patches merged by a convolution."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model import decoder
from trials.model.family import VisionModules
from trials.model.inputs.patched_videos import GLM
from trials.model.towers import merged_patches
from trials.model.towers.merged_patches import (
    check_patches,
    check_sections,
    check_square,
    check_towers,
    embed_patches,
    patch_encoder,
    shrink_patches,
    shrink_square,
)

AUTO_MODEL = AutoModelForImageTextToText
language_runner = decoder.language_runner
model_inputs = merged_patches.model_inputs
positions = merged_patches.placed_by_layer
random_images = merged_patches.random_images
unit_flops = merged_patches.unit_flops
vision_runner = merged_patches.vision_runner
OTHER_FORMS: dict[str, str] = {}
_USUAL_SECTIONS = [8, 12, 12]


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is GLM-4.1V or GLM-4.5V."""
    return config.model_type in ("glm4v", "glm4v_moe")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for sizes that do not divide, and for a tower without learned positions."""
    if "num_hidden_layers" in vars(config):
        raise ModelError(
            "config.json has the language model's settings at its top level, as the first files of GLM-4.1V, where "
            "transformers passes over them; take the model's current config.json, with a text_config"
        )
    rope = config.get_text_config().rope_parameters
    check_patches(config)
    check_towers(config)
    check_sections(config, share=rope.get("partial_rotary_factor", 1.0), usual=_USUAL_SECTIONS)
    check_square(config)


encoder = functools.partial(patch_encoder, positions=positions, rules=GLM)


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave `layers` layers with two heads, and a small square of learned positions."""
    shrink_patches(settings, layers)
    shrink_square(settings)


def vision_modules(model: PreTrainedModel) -> VisionModules:
    """Return the tower in parts; the convolution that merges patches belongs to the projector."""
    tower = model.model.visual
    return replace(
        merged_patches.vision_modules(model),
        embedding=(tower.patch_embed, tower.post_conv_layernorm, tower.embeddings),
        behind=(tower.post_layernorm,),
        projector=(tower.downsample, tower.merger),
    )


def embed_vision(model: PreTrainedModel, pixels: torch.Tensor, tokens: PackTokens) -> torch.Tensor:
    """Return vision states [patches, hidden] of pixels [units, merged patches, values].

    Learned positions form a square, which is interpolated to the patches of each layer of frames.
    """
    tower = model.model.visual
    states = tower.post_conv_layernorm(embed_patches(model, pixels))
    sizes = tokens.grids.repeat_interleave(tokens.grids[:, 0], dim=0)
    lengths = get_vision_cu_seqlens(tokens.grids).diff()
    places = get_vision_position_ids(tokens.grids, tower.spatial_merge_size).T
    moved = (each.to(states.device, non_blocking=True) for each in (lengths, sizes, *places))
    embedded: torch.Tensor = tower.embeddings(states, *moved)
    return embedded


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return features [merged patches, hidden]."""
    tower, side = model.model.visual, model.model.visual.spatial_merge_size
    squares = tower.post_layernorm(states[0]).unflatten(0, (-1, side, side)).permute(0, 3, 1, 2)
    return (tower.merger(tower.downsample(squares).flatten(1)),)
