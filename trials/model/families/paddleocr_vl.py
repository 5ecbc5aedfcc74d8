"""PaddleOCR-VL: native resolution, patches row after row, and learned positions that are interpolated to each image."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from trials.data.tokens import PackTokens
from trials.model import decoder
from trials.model.family import Images, LayerRunner, VisionModules
from trials.model.shrunk import narrow, shorten
from trials.model.towers import merged_patches
from trials.model.towers.merged_patches import (
    block_runner,
    check_patches,
    check_sections,
    check_square,
    check_towers,
    frames,
    patch_encoder,
    shrink_marks,
    shrink_square,
)

AUTO_MODEL = AutoModelForImageTextToText
language_runner = decoder.language_runner
positions = merged_patches.placed_by_layer
random_images = merged_patches.random_images
unit_flops = merged_patches.unit_flops
OTHER_FORMS: dict[str, str] = {}
_USUAL_SECTIONS = [16, 24, 24]


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is PaddleOCR-VL."""
    return bool(config.model_type == "paddleocr_vl")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for sizes that do not divide, and for a tower without learned positions."""
    check_patches(config)
    check_towers(config, output=None)
    check_sections(config, usual=_USUAL_SECTIONS)
    check_square(config)


encoder = functools.partial(patch_encoder, positions=positions, rules=None)


def model_inputs(config: PretrainedConfig, input_ids: torch.Tensor, images: Images | None) -> dict[str, Any]:
    """Return what the model takes, with patches as small images."""
    inputs = merged_patches.model_inputs(config, input_ids, images)
    if images:
        inputs["pixel_values"] = _small_images(inputs["pixel_values"], config.vision_config.patch_size)
    return inputs


def _small_images(patches: torch.Tensor, side: int) -> torch.Tensor:
    """Return [patches, 3, side, side] of patches [patches, values]."""
    images: torch.Tensor = patches.unflatten(1, (-1, side, side))
    return images


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave `layers` layers with at most two heads, and a small square of learned positions."""
    shorten(settings["vision_config"], layers)
    narrow(settings["vision_config"])
    shrink_square(settings)
    shrink_marks(settings)


def vision_modules(model: PreTrainedModel) -> VisionModules:
    """Return the tower in parts."""
    tower = model.model.visual.vision_model
    return VisionModules(
        embedding=(tower.embeddings,),
        layers=tuple(tower.encoder.layers),
        behind=(tower.post_layernorm,),
        projector=(model.model.projector,),
    )


def embed_vision(model: PreTrainedModel, pixels: torch.Tensor, tokens: PackTokens) -> torch.Tensor:
    """Return vision states [patches, hidden] of pixels [units, merged patches, values]."""
    embeddings = model.model.visual.vision_model.embeddings
    indices, weights = get_vision_interpolation_indices_and_weights(
        tokens.grids,
        num_grid_per_side=embeddings.num_grid_per_side,
        mode=embeddings.interpolation_mode,
        align_corners=embeddings.interpolation_align_corners,
    )
    patches = _small_images(pixels.flatten(0, 1), embeddings.patch_size)
    states: torch.Tensor = embeddings(
        patches[None],
        interp_indices=indices.to(pixels.device, non_blocking=True),
        interp_weights=weights.to(pixels.device, non_blocking=True),
    )
    return states


def vision_runner(model: PreTrainedModel, states: torch.Tensor, tokens: PackTokens) -> LayerRunner:
    """Implement `Family.vision_runner`: the patches of an image attend to each other."""
    tower = model.model.visual.vision_model
    # Patches are merged behind the tower, so that their places go row after row.
    places = get_vision_position_ids(tokens.grids, 1).to(states.device, non_blocking=True)
    rotary, images = tower.encoder.rotary_pos_emb(states, places), frames(tokens)
    attend = block_runner(tower, len(states))

    def run(layer: nn.Module, number: int, states: torch.Tensor) -> torch.Tensor:
        return attend(layer, states, images, rotary)

    return run


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return features [merged patches, hidden]."""
    normed = model.model.visual.vision_model.post_layernorm(states[0])
    return (model.model.projector(normed, tokens.grids),)
