"""LLaVA-1.5 and ViP-LLaVA: one tile for each image."""

import functools
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
from trials.model.inputs.processor import check_counts
from trials.model.towers import clip_towers, siglip, tiles
from trials.model.towers.clip_towers import (
    check_preparation,
    check_tile,
    check_tower,
    project,
    shrink_tower,
    tile_features,
)

AUTO_MODEL = AutoModelForImageTextToText
embed_vision = clip_towers.embed_vision
language_runner = decoder.language_runner
model_inputs = tiles.model_inputs
positions = counted_positions
unit_flops = clip_towers.unit_flops
vision_modules = clip_towers.vision_modules
vision_runner = siglip.vision_runner
_OWN_FORM = (
    "it is LLaVA in the form of its own code; give the Hugging Face form, of model_type 'llava' or 'llava_next', which "
    "is published under names that begin with llava-hf, such as llava-hf/llava-1.5-7b-hf"
)
# LLaVA's own form of version 1.5 has the model_type `llava` as well, so its class is looked at.
OTHER_FORMS = {"llava_llama": _OWN_FORM, "LlavaLlamaForCausalLM": _OWN_FORM}


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is LLaVA-1.5, whose tower is not Pixtral's, or ViP-LLaVA."""
    is_llava = config.model_type == "llava" and config.vision_config.model_type != "pixtral"
    return bool(is_llava or config.model_type == "vipllava")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for another tower than CLIP's and SigLIP's, and for tiles without a feature."""
    check_tower(config)
    if not tile_features(config):
        raise ModelError(
            "a tile has one patch, which is left out as the first token of the tower; correct patch_size in the "
            "vision_config of config.json, or set vision_feature_select_strategy to 'full' in a model of LLaVA-1.5"
        )


def random_images(config: PretrainedConfig, units: int) -> Images:
    """Return tiles [units, 3, height, width] and their image tokens."""
    side = config.vision_config.image_size
    return tiles.random_tiles(config, units, (3, side, side), tile_features(config))


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave the tower `layers` layers with at most two heads, and tiles of four patches."""
    shrink_tower(settings, layers, side=2)


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return projected features [tiles x features, hidden]."""
    return (project(model, states).flatten(0, 1),)


class _TileInputs(tiles.EqualTiles):
    """Implementation of `ImageInputs` (trials/model/inputs/chat_encoder.py)."""

    def __init__(self, config: PretrainedConfig, processor: Any) -> None:
        """Raise ModelError for a processor whose tiles or tokens differ from the model's."""
        check(config)
        self._processor = processor.image_processor
        self._image_token = config.image_token_id
        self._features = tile_features(config)
        side = config.vision_config.image_size
        self.unit_shape = (3, side, side)
        check_preparation(self._processor)
        made, _ = self.pixels([np.zeros((5, 7, 3), dtype=np.uint8)])
        check_tile(config, made)
        check_counts(processor, {(5, 7): self._features})

    def tokens(self, size: tuple[int, int], count: int) -> list[int]:
        """Return `count` image tokens."""
        return [self._image_token] * count

    def pixels(
        self, images: Sequence[NDArray[np.uint8]], resized: Sequence[tuple[int, int] | None] = ()
    ) -> tuple[NDArray[np.float32], Ints]:
        """Return (tiles [images, 3, height, width], no grids)."""
        made = self._processor(list(images), input_data_format="channels_last", return_tensors="np")
        return np.asarray(made["pixel_values"], dtype=np.float32), NO_GRIDS


encoder = functools.partial(chat_encoder, inputs=_TileInputs, positions=positions)
