"""Qwen2.5-VL: native resolution, with attention inside windows in most vision layers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel
from transformers.vision_utils import (
    get_vision_attention_seqlens,
    get_vision_position_ids,
    get_vision_window_index,
)

from trials.data.records.sample import Encoder
from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model.decoder import language_runner
from trials.model.family import LayerRunner, VisionModules
from trials.model.features import place_features
from trials.model.heads import check_heads
from trials.model.inputs.chat_encoder import chat_encoder
from trials.model.merged_patches import (
    PatchInputs,
    check_patches,
    model_inputs,
    positions,
    random_images,
    shrink_tokens,
)
from trials.model.shrunk import VOCABULARY

__all__ = [
    "AUTO_MODEL",
    "OTHER_FORMS",
    "check",
    "embed_vision",
    "encoder",
    "join_text",
    "language_runner",
    "model_inputs",
    "positions",
    "random_images",
    "shrink_vision",
    "takes",
    "unit_flops",
    "vision_modules",
    "vision_runner",
]

AUTO_MODEL = AutoModelForImageTextToText
OTHER_FORMS: dict[str, str] = {}


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is Qwen2.5-VL."""
    return bool(config.model_type == "qwen2_5_vl")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for sizes that do not divide."""
    vision = config.vision_config
    check_patches(config)
    check_heads(config.get_text_config(), "language")
    if vision.hidden_size % (4 * vision.num_heads):
        raise ModelError(
            f"the vision model has {vision.num_heads} heads for a hidden_size of {vision.hidden_size}, which must be a "
            "multiple of four times the heads; correct num_heads or hidden_size in config.json"
        )
    if vision.window_size < vision.patch_size * vision.spatial_merge_size:
        raise ModelError(
            f"window_size {vision.window_size} is below a merged patch of {vision.patch_size} x "
            f"{vision.spatial_merge_size} pixels; correct it in config.json"
        )
    if vision.out_hidden_size != config.get_text_config().hidden_size:
        raise ModelError(
            f"out_hidden_size is {vision.out_hidden_size} but the language model's hidden_size is "
            f"{config.get_text_config().hidden_size}; correct one of them in config.json"
        )


def unit_flops(config: PretrainedConfig, *, tower: int, projector: int) -> float:
    """Count 2 operations for each parameter and patch, and attention inside windows (Megatron-LM, appendix)."""
    vision = config.vision_config
    inside = vision.spatial_merge_size**2
    attention = 4 * vision.depth * inside * (vision.window_size // vision.patch_size) ** 2 * vision.hidden_size
    return float(2 * tower * inside + attention + 2 * projector)


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave `layers` layers, at least one with windows of one merged patch and one without, and two heads."""
    vision = settings["vision_config"]
    width = vision["hidden_size"] // vision["num_heads"]
    heads = min(2, vision["num_heads"])
    vision.update(
        depth=layers,
        num_heads=heads,
        hidden_size=heads * width,
        intermediate_size=min(128, vision["intermediate_size"]),
        out_hidden_size=settings["text_config"]["hidden_size"],
        fullatt_block_indexes=[layers - 1],
        window_size=vision["patch_size"] * vision["spatial_merge_size"],
    )
    shrink_tokens(settings, VOCABULARY)


def encoder(model_path: str, trust_remote_code: bool = False, max_tokens: int | None = None) -> Encoder:
    """Return the encoder of a model folder, which cuts samples to `max_tokens`."""
    return chat_encoder(model_path, trust_remote_code, max_tokens, inputs=PatchInputs, positions=positions)


def vision_modules(model: PreTrainedModel) -> VisionModules:
    """Return the tower in parts."""
    tower = model.model.visual
    return VisionModules(embedding=(tower.patch_embed,), layers=tuple(tower.blocks), projector=(tower.merger,))


def embed_vision(model: PreTrainedModel, pixels: torch.Tensor, tokens: PackTokens) -> torch.Tensor:
    """Return vision states [patches, hidden] of pixels [units, merged patches, values], window by window."""
    tower = model.model.visual
    states: torch.Tensor = tower.patch_embed(pixels.flatten(0, 1).to(model.dtype))
    order, _ = _windows(tower, tokens)
    return _reordered(tower, states, order)


def vision_runner(model: PreTrainedModel, states: torch.Tensor, tokens: PackTokens) -> LayerRunner:
    """Run layers inside windows, and those of `fullatt_block_indexes` inside each image."""
    tower = model.model.visual
    grids = tokens.grids.to(states.device)
    order, windows = _windows(tower, tokens)
    places = get_vision_position_ids(grids, tower.spatial_merge_size)
    rotary = tuple(_reordered(tower, each, order) for each in tower.rotary_pos_emb(states, places))
    images, _ = get_vision_attention_seqlens(grids, tower.config)
    windows = windows.to(states.device)

    def run(layer: nn.Module, number: int, states: torch.Tensor) -> torch.Tensor:
        inside = images if number in tower.fullatt_block_indexes else windows
        result: torch.Tensor = layer(states, cu_seqlens=inside, position_embeddings=rotary)
        return result

    return run


def join_text(model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens) -> Sequence[torch.Tensor]:
    """Return language states [1, T, hidden], in which each image token is the next merged patch."""
    tower = model.model.visual
    order, _ = _windows(tower, tokens)
    features = tower.merger(states[0])[torch.argsort(order)]
    return (place_features(model, features, tokens),)


def _windows(tower: Any, tokens: PackTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (merged patches in the order of their windows, ends of the windows in patches)."""
    config = tower.config
    order, ends = get_vision_window_index(
        tokens.grids, config.spatial_merge_size, config.window_size, config.patch_size
    )
    return order, ends


def _reordered(tower: Any, values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return values [patches, ...] with their merged patches in `order`."""
    result: torch.Tensor = tower.permute_input_for_window_attn(values, order.to(values.device), len(values))
    return result
