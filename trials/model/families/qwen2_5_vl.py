"""Qwen2.5-VL: native resolution, with attention inside windows in most vision layers."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.vision_utils import get_vision_window_index

from trials.arrays import Ints
from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model import decoder
from trials.model.family import LayerRunner, VisionModules
from trials.model.inputs.patched_videos import QWEN2
from trials.model.towers import merged_patches
from trials.model.towers.merged_patches import (
    between,
    block_runner,
    check_patches,
    check_sections,
    check_towers,
    embed_patches,
    frames,
    patch_encoder,
    placed,
    rotary_embeddings,
    shrink_patches,
)
from trials.model.towers.merged_patches import unit_flops as patch_flops

AUTO_MODEL = AutoModelForImageTextToText
language_runner = decoder.language_runner
model_inputs = merged_patches.model_inputs
random_images = merged_patches.random_images
OTHER_FORMS: dict[str, str] = {}


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is Qwen2.5-VL."""
    return bool(config.model_type == "qwen2_5_vl")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for sizes that do not divide."""
    vision = config.vision_config
    check_patches(config)
    check_towers(config)
    check_sections(config)
    if vision.window_size < vision.patch_size * vision.spatial_merge_size:
        raise ModelError(
            f"window_size {vision.window_size} is below a merged patch of {vision.patch_size} x "
            f"{vision.spatial_merge_size} pixels; correct it in config.json"
        )


def unit_flops(config: PretrainedConfig, *, tower: int, projector: int) -> float:
    """Count 2 operations for each parameter and patch, and attention inside windows (Megatron-LM, appendix)."""
    vision = config.vision_config
    window = (vision.window_size // vision.patch_size) ** 2
    attention: int = 4 * vision.depth * vision.spatial_merge_size**2 * window * vision.hidden_size
    return patch_flops(config, tower=tower, projector=projector) + attention


def positions(
    config: PretrainedConfig,
    input_ids: Ints,
    grids: Ints,
    seconds: Sequence[float] | None = None,
) -> Ints:
    """Implement `Family.positions`: layers of frames follow time, at `tokens_per_second`."""
    pace = np.float32(config.vision_config.tokens_per_second)
    return placed(config, input_ids, grids, [float(pace * np.float32(each)) for each in seconds or [0.0] * len(grids)])


encoder = functools.partial(patch_encoder, positions=positions, rules=QWEN2)


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave `layers` layers, the last of them without windows, which hold 2 x 2 merged patches."""
    shrink_patches(settings, layers)
    vision = settings["vision_config"]
    # Small enough to cut an image of the comparison, and large enough to change the order of its patches.
    window = 2 * vision["patch_size"] * vision["spatial_merge_size"]
    vision.update(fullatt_block_indexes=[layers - 1], window_size=window)


def vision_modules(model: PreTrainedModel) -> VisionModules:
    """Return the tower in parts; each layer says whether it has windows, as transformers does by its number."""
    found = merged_patches.vision_modules(model)
    layer: Any
    for number, layer in enumerate(found.layers):
        layer.has_windows = number not in model.model.visual.fullatt_block_indexes
    return found


def embed_vision(model: PreTrainedModel, pixels: torch.Tensor, tokens: PackTokens) -> torch.Tensor:
    """Return vision states [patches, hidden] of pixels [units, merged patches, values], window by window."""
    tower = model.model.visual
    order, _ = _windows(tower, tokens)
    states = embed_patches(model, pixels)
    return _reordered(tower, states, order.to(states.device, non_blocking=True))


def vision_runner(model: PreTrainedModel, states: torch.Tensor, tokens: PackTokens) -> LayerRunner:
    """Run layers that have windows inside these, and the others inside each image."""
    tower = model.model.visual
    order, ends = _windows(tower, tokens)
    order = order.to(states.device, non_blocking=True)
    rotary = tuple(_reordered(tower, each, order) for each in rotary_embeddings(tower, states, tokens))
    images, windows = frames(tokens), between(ends)
    attend = block_runner(tower, len(states))

    def run(layer: nn.Module, number: int, states: torch.Tensor) -> torch.Tensor:
        return attend(layer, states, windows if layer.has_windows else images, rotary)

    return run


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return features [merged patches, hidden], in the order of the images."""
    tower = model.model.visual
    order, _ = _windows(tower, tokens)
    merged = tower.merger(states[0])
    return (merged[torch.argsort(order).to(merged.device, non_blocking=True)],)


def _windows(tower: Any, tokens: PackTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (merged patches in the order of their windows, ends of the windows in patches), both on the CPU."""
    config = tower.config
    order, ends = get_vision_window_index(
        tokens.grids, config.spatial_merge_size, config.window_size, config.patch_size
    )
    return order, ends


def _reordered(tower: Any, values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return values [patches, ...] with their merged patches in `order`."""
    result: torch.Tensor = tower.permute_input_for_window_attn(values, order, len(values))
    return result
