"""LLaVA-NeXT (LLaVA-1.6): each image whole and in crops, with a learned feature behind each row of patches.

LLaVA-NeXT-Video pools the states of a frame before they are projected.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from trials.data.records.sample import Encoder
from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model import decoder
from trials.model.family import Images
from trials.model.inputs.chat_encoder import chat_encoder
from trials.model.inputs.positions import counted_positions
from trials.model.skeleton import load_config
from trials.model.towers import clip_towers, crops, siglip
from trials.model.towers.clip_towers import project, projected_states, shrink_tower
from trials.model.towers.tile_videos import NEXT, VIDEO_SIZE, TileVideos

AUTO_MODEL = AutoModelForImageTextToText
embed_vision = clip_towers.embed_vision
language_runner = decoder.language_runner
positions = counted_positions
unit_flops = clip_towers.unit_flops
vision_modules = clip_towers.vision_modules
vision_runner = siglip.vision_runner
OTHER_FORMS = {
    "llava_mistral": "it is LLaVA-NeXT in the form of its own code; give the Hugging Face form, of model_type "
    "'llava_next', which is published under names that begin with llava-hf, such as llava-hf/llava-v1.6-mistral-7b-hf"
}
_POOLED = ("average", "max")
_SIDE = 4
"""Patches in a row of a crop of the shrunk model: with fewer, no row of padding is taken off."""


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is LLaVA-NeXT or LLaVA-NeXT-Video."""
    return config.model_type == "llava_next" or _takes_videos(config)


def _takes_videos(config: PretrainedConfig) -> bool:
    return bool(config.model_type == "llava_next_video")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for another tower than CLIP's and SigLIP's, crops that cannot be joined, and learned pooling."""
    crops.check_crops(config)
    if not _takes_videos(config):
        return
    if config.spatial_pool_mode not in _POOLED:
        raise ModelError(
            f"spatial_pool_mode is {config.spatial_pool_mode[:40]!r}, but frames are pooled without weights of their "
            f"own; use a model with one of {', '.join(_POOLED)}"
        )
    if not 1 <= config.spatial_pool_stride <= crops.patches_per_side(config):
        raise ModelError(
            f"spatial_pool_stride is {config.spatial_pool_stride}, but a frame has {crops.patches_per_side(config)} "
            "patches in a row; correct it in config.json"
        )


def random_images(config: PretrainedConfig, units: int) -> Images:
    """Return images cut into crops, and whole ones for what is left of the units."""
    return crops.random_images(config, units, crops.in_rows, crops_several=True)


def model_inputs(config: PretrainedConfig, input_ids: torch.Tensor, images: Images | None) -> dict[str, Any]:
    """Return what the model takes; it cuts every image, so that it takes none of one unit."""
    inputs: dict[str, Any] = {"input_ids": input_ids[None]}
    if images:
        inputs |= {"pixel_values": images.pixels, "image_sizes": images.grids[:, 1:]}
    return inputs


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave the tower `layers` layers with at most two heads, and resolutions of one, two and four small crops."""
    shrink_tower(settings, layers, _SIDE)
    tile = settings["vision_config"]["image_size"]
    settings["image_grid_pinpoints"] = [[tile, tile], [tile, 2 * tile], [2 * tile, tile], [2 * tile, 2 * tile]]


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return features and ends of rows [tokens, hidden]."""
    newline = model.model.image_newline
    if not _takes_videos(model.config):
        return (crops.shown_features(crops.in_rows, model.config, project(model, states), newline, tokens.grids),)
    pack = functools.partial(_packed, model)
    return (crops.shown_features(pack, model.config, projected_states(model, states), newline, tokens.grids),)


def _packed(
    model: PreTrainedModel, config: PretrainedConfig, states: torch.Tensor, size: crops.Size, newline: torch.Tensor
) -> torch.Tensor:
    """Implement `crops.Packer` for states that are not yet projected: those of frames are pooled before."""
    project_states = model.model.multi_modal_projector
    if VIDEO_SIZE not in size:
        return crops.in_rows(config, project_states(states), size, newline)
    frames = project_states(model.model.vision_resampler(states)).flatten(0, 1)
    # No row of it has an end, but each rank has every gradient.
    return torch.cat([frames, newline[None, :].to(frames.dtype)[:0]])


def encoder(model_path: str, trust_remote_code: bool = False, max_tokens: int | None = None) -> Encoder:
    """Return the encoder of a model folder, which cuts samples to `max_tokens`."""
    has_videos = _takes_videos(load_config(model_path, trust_remote_code=trust_remote_code))
    videos = functools.partial(TileVideos, rules=NEXT) if has_videos else None
    return chat_encoder(
        model_path, trust_remote_code, max_tokens, inputs=_crop_inputs, positions=positions, videos=videos
    )


def _crop_inputs(config: PretrainedConfig, processor: Any) -> crops.CropInputs:
    check(config)
    return crops.CropInputs(config, processor, pack=crops.in_rows)
