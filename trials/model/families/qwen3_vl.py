"""Qwen3-VL, dense or with experts: features of several vision layers are added behind the first language layers."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.vision_utils import get_vision_interpolation_indices_and_weights

from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model import decoder
from trials.model.family import VisionModules
from trials.model.inputs.patched_videos import QWEN3
from trials.model.towers import merged_patches
from trials.model.towers.merged_patches import check_patches, check_towers, embed_patches, patch_encoder, shrink_patches

AUTO_MODEL = AutoModelForImageTextToText
language_runner = decoder.language_runner
model_inputs = merged_patches.model_inputs
positions = merged_patches.placed_by_layer
random_images = merged_patches.random_images
unit_flops = merged_patches.unit_flops
vision_runner = merged_patches.vision_runner
OTHER_FORMS: dict[str, str] = {}
_LEARNED_POSITIONS = 16
"""Of a shrunk model: a square that is smaller than some images and larger than others."""


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is Qwen3-VL."""
    return config.model_type in ("qwen3_vl", "qwen3_vl_moe")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for sizes that do not divide, features without a layer, and a loss that is not computed."""
    vision, text = config.vision_config, config.get_text_config()
    check_patches(config)
    check_towers(config)
    kept = list(vision.deepstack_visual_indexes)
    if kept != sorted(set(kept)) or not all(0 <= number < vision.depth for number in kept):
        raise ModelError(
            f"deepstack_visual_indexes is {kept}, which must be ascending numbers of the {vision.depth} vision layers; "
            "correct it in config.json"
        )
    if len(kept) > text.num_hidden_layers:
        raise ModelError(
            f"deepstack_visual_indexes names {len(kept)} vision layers, whose features are added behind as many "
            f"language layers, but the model has {text.num_hidden_layers}; correct it in config.json"
        )
    if vision.num_position_embeddings < 1:
        raise ModelError(
            f"num_position_embeddings is {vision.num_position_embeddings}; correct it in the vision_config of "
            "config.json, to the square of a whole number"
        )


encoder = functools.partial(patch_encoder, positions=positions, rules=QWEN3)


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave `layers` layers with two heads, and as many of the first layers' features as there were if they can be."""
    shrink_patches(settings, layers)
    vision = settings["vision_config"]
    kept = min(len(vision["deepstack_visual_indexes"]), layers, settings["text_config"]["num_hidden_layers"])
    vision["deepstack_visual_indexes"] = list(range(kept))
    vision["num_position_embeddings"] = min(_LEARNED_POSITIONS, vision["num_position_embeddings"])


def vision_modules(model: PreTrainedModel) -> VisionModules:
    """Return the tower in parts; what projects the features of its inner layers belongs to the projector."""
    tower = model.model.visual
    parts = merged_patches.vision_modules(model)
    return replace(
        parts,
        embedding=(*parts.embedding, tower.pos_embed),
        kept=tuple(tower.deepstack_visual_indexes),
        added=len(tower.deepstack_visual_indexes),
        projector=(*parts.projector, *tower.deepstack_merger_list),
    )


def embed_vision(model: PreTrainedModel, pixels: torch.Tensor, tokens: PackTokens) -> torch.Tensor:
    """Return vision states [patches, hidden] of pixels [units, merged patches, values].

    Learned positions form a square, which is interpolated to the patches of each image.
    """
    tower = model.model.visual
    states = embed_patches(model, pixels)
    found = get_vision_interpolation_indices_and_weights(
        tokens.grids,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=tower.spatial_merge_size,
    )
    corners, weights = (each.to(states.device, non_blocking=True) for each in found)
    learned = torch.einsum("pc,pch->ph", weights, tower.pos_embed(corners).to(weights.dtype))
    return states + learned.to(states.dtype)


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return features [merged patches, hidden] of the last layer, then of the inner ones."""
    tower = model.model.visual
    last, *inner = states
    features = (merger(each) for merger, each in zip(tower.deepstack_merger_list, inner, strict=True))
    return (tower.merger(last), *features)
