"""Aya Vision: images in tiles and the whole one last, and squares of patches that the projector merges."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from trials.arrays import Ints
from trials.data.records.sample import NO_GRIDS
from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model import decoder
from trials.model.family import Images
from trials.model.inputs.chat_encoder import chat_encoder
from trials.model.inputs.positions import counted_positions
from trials.model.inputs.processor import count_images, load_processor, show_by_token
from trials.model.towers import clip_towers, siglip, tiles
from trials.model.towers.clip_towers import project
from trials.model.towers.tiles import check_tile_numbers

AUTO_MODEL = AutoModelForImageTextToText
embed_vision = clip_towers.embed_vision
language_runner = decoder.language_runner
model_inputs = tiles.model_inputs
positions = counted_positions
vision_modules = clip_towers.vision_modules
vision_runner = siglip.vision_runner
OTHER_FORMS: dict[str, str] = {}


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is Aya Vision."""
    return bool(config.model_type == "aya_vision")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for another tower than CLIP's and SigLIP's, and for patches that cannot be merged in squares."""
    clip_towers.check_tower(config)
    if len(clip_towers.feature_layers(config)) != 1:
        raise ModelError(
            f"vision_feature_layer is {config.vision_feature_layer}, but the projector takes the states of one layer; "
            "correct it in config.json to a number, such as -1"
        )
    patches, factor = clip_towers.tile_features(config), config.downsample_factor
    side = math.isqrt(patches)
    if not patches or side**2 != patches or factor < 1 or side % factor:
        raise ModelError(
            f"{patches} patches of a tile cannot be merged in squares of downsample_factor {factor}; correct it, "
            "vision_feature_select_strategy, or image_size or patch_size of the vision_config, in config.json"
        )


def _tile_tokens(config: PretrainedConfig) -> int:
    """Return the image tokens of one tile."""
    return clip_towers.tile_features(config) // int(config.downsample_factor) ** 2


def unit_flops(config: PretrainedConfig, *, tower: int, projector: int) -> float:
    """Return the operations of one tile."""
    # The projector runs once for each square of patches.
    return clip_towers.unit_flops(config, tower=tower, projector=projector // int(config.downsample_factor) ** 2)


def random_images(config: PretrainedConfig, units: int) -> Images:
    """Return tiles [units, 3, height, width] and their image tokens."""
    side = config.vision_config.image_size
    return tiles.random_tiles(config, units, (3, side, side), _tile_tokens(config))


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave the tower `layers` layers with at most two heads, and tiles of two features in a row."""
    clip_towers.shrink_tower(settings, layers, side=2 * settings["downsample_factor"])


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return projected features [tiles x features, hidden]."""
    return (project(model, states).flatten(0, 2),)


def _load(path: str, config: PretrainedConfig, *, trust_remote_code: bool) -> Any:
    """Implement `Loader` (trials/model/inputs/processor.py)."""
    processor = load_processor(path, config, trust_remote_code=trust_remote_code)
    show_by_token(processor, processor.img_patch_token)
    return processor


class _NumberedTiles(tiles.EqualTiles):
    """Implementation of `ImageInputs` (trials/model/inputs/chat_encoder.py)."""

    def __init__(self, config: PretrainedConfig, processor: Any) -> None:
        """Raise ModelError for a processor whose tiles or tokens differ from the model's."""
        check(config)
        self._images, self._tokenizer = processor.image_processor, processor.tokenizer
        self._marks = (processor.start_of_img_token, processor.tile_token, processor.tile_global_token)
        self._end, self._patch = processor.end_of_img_token, processor.img_patch_token
        self._image_token = config.image_token_id
        self._features = _tile_tokens(config)
        side = config.vision_config.image_size
        self.unit_shape = (3, side, side)
        check_tile_numbers(self._images)
        clip_towers.check_preparation(self._images)
        black = np.zeros((side, side, 3), dtype=np.uint8)
        made, _ = self.pixels([black])
        clip_towers.check_tile(config, made)
        (count,) = count_images(processor, ((side, side),))
        expected = count.units * (self._features + 1) + 2
        if count.tokens != expected:
            raise ModelError(
                f"the processor shows {count.units} tiles as {count.tokens} tokens, but the model makes "
                f"{self._features} features of each, which are {expected} with their marks; correct img_size, "
                "patch_size and downsample_factor in processor_config.json"
            )

    def tokens(self, size: tuple[int, int], count: int) -> list[int]:
        """Return the image tokens of all tiles, each behind its mark."""
        start, tile, whole = self._marks
        cut = (count - 2) // (self._features + 1) - 1
        text = "".join(f"{tile}_{number}{self._patch}" for number in range(1, cut + 1))
        text = f"{start}{text}{whole}{self._patch}{self._end}"
        found: Sequence[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return [each for one in found for each in ([one] * self._features if one == self._image_token else [one])]

    def pixels(
        self, images: Sequence[NDArray[np.uint8]], resized: Sequence[tuple[int, int] | None] = ()
    ) -> tuple[NDArray[np.float32], Ints]:
        """Return (tiles [tiles, 3, height, width], each whole image behind its tiles, no grids)."""
        options: dict[str, Any] = {"crop_to_patches": True, "input_data_format": "channels_last"}
        made = [self._images([image], return_tensors="np", **options)["pixel_values"] for image in images]
        return np.concatenate(made, dtype=np.float32), NO_GRIDS


encoder = functools.partial(chat_encoder, inputs=_NumberedTiles, positions=positions, load=_load)
