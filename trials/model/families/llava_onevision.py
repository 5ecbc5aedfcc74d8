"""LLaVA-OneVision: a single image whole and in crops, several images whole, with a learned feature as line end."""

import functools
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, LlavaOnevisionModel, PretrainedConfig, PreTrainedModel

from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model import decoder
from trials.model.family import Images
from trials.model.inputs.chat_encoder import chat_encoder
from trials.model.inputs.positions import counted_positions
from trials.model.towers import clip_towers, crops, siglip
from trials.model.towers.clip_towers import project, shrink_tower
from trials.model.towers.tile_videos import ONEVISION, VIDEO_SIZE, TileVideos

AUTO_MODEL = AutoModelForImageTextToText
embed_vision = clip_towers.embed_vision
language_runner = decoder.language_runner
positions = counted_positions
unit_flops = clip_towers.unit_flops
vision_modules = clip_towers.vision_modules
vision_runner = siglip.vision_runner
OTHER_FORMS = {
    "llava_qwen": "it is LLaVA-OneVision in the form of its own code; give the Hugging Face form, of model_type "
    "'llava_onevision', which is published under names that end in -hf, such as llava-hf/llava-onevision-qwen2-7b-ov-hf"
}
_SIDE = 4
"""Patches in a row of a crop of the shrunk model: with fewer, no row of padding is taken off."""
_ASPECT = re.compile(r"anyres_max_([1-9][0-9]{0,3})")


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is LLaVA-OneVision."""
    return bool(config.model_type == "llava_onevision")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for another tower than CLIP's and SigLIP's, and for crops that cannot be joined."""
    crops.check_crops(config)
    found = _ASPECT.fullmatch(config.vision_aspect_ratio)
    if found is None:
        raise ModelError(
            f"vision_aspect_ratio is {config.vision_aspect_ratio[:60]!r}, which must be anyres_max_ with the most "
            "crops whose features are kept, such as anyres_max_9; correct it in config.json"
        )
    # The features of a longer row would be scaled down to a height of 0.
    longest = int(found[1]) * crops.patches_per_side(config) * config.vision_config.image_size
    if any(max(each) > longest for each in config.image_grid_pinpoints):
        raise ModelError(
            f"image_grid_pinpoints has a resolution longer than the {longest} pixels that can be scaled down with "
            f"vision_aspect_ratio {config.vision_aspect_ratio}; correct one of them in config.json"
        )


def random_images(config: PretrainedConfig, units: int) -> Images:
    """Return one image cut into crops, or several whole images where no crop grid has this number of units."""
    return crops.random_images(config, units, _pack, crops_several=False)


def model_inputs(config: PretrainedConfig, input_ids: torch.Tensor, images: Images | None) -> dict[str, Any]:
    """Return what the model takes; it cuts a single image, so that it takes none of one unit."""
    inputs: dict[str, Any] = {"input_ids": input_ids[None]}
    if images:
        inputs |= {
            "pixel_values": images.pixels,
            "image_sizes": images.grids[:, 1:],
            "batch_num_images": torch.tensor(_images_of_samples(images.grids)),
        }
    return inputs


def _images_of_samples(grids: torch.Tensor) -> list[int]:
    """Return the number of images of each sample of a pack, where samples with several may be counted as one.

    A single image is cut, so it has two units or more; those of a sample with several are whole.
    """
    counts: list[int] = []
    was_whole = False
    for units in grids[:, 0].tolist():
        is_whole = units == 1
        if is_whole and was_whole:
            counts[-1] += 1
        else:
            counts.append(1)
        was_whole = is_whole
    return counts


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave the tower `layers` layers with at most two heads, and resolutions of two and four small crops.

    Four are scaled down to two.
    """
    shrink_tower(settings, layers, _SIDE)
    tile = settings["vision_config"]["image_size"]
    settings["image_grid_pinpoints"] = [[tile, 2 * tile], [2 * tile, tile], [2 * tile, 2 * tile]]
    settings["vision_aspect_ratio"] = "anyres_max_2"


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return features and ends of rows [tokens, hidden]."""
    newline = model.model.image_newline
    return (crops.shown_features(_pack, model.config, project(model, states), newline, tokens.grids),)


def _crop_inputs(config: PretrainedConfig, processor: Any) -> crops.CropInputs:
    check(config)
    return crops.CropInputs(config, processor, pack=_pack)


encoder = functools.partial(
    chat_encoder, inputs=_crop_inputs, positions=positions, videos=functools.partial(TileVideos, rules=ONEVISION)
)


def _pack(config: PretrainedConfig, features: torch.Tensor, size: crops.Size, newline: torch.Tensor) -> torch.Tensor:
    """Implement `crops.Packer`: the frames of a video are scaled down, and have one line end together."""
    if VIDEO_SIZE not in size:
        most = int(config.vision_aspect_ratio.removeprefix("anyres_max_"))
        return crops.in_rows(config, features, size, newline, most)
    # The model's own function needs nothing of a model but its configuration.
    model: Any = SimpleNamespace(config=config)
    frames = LlavaOnevisionModel.apply_pooling(model, features).flatten(0, 1)
    return torch.cat([frames, newline[None].to(frames.dtype)])
