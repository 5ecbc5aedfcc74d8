"""InternVL in its Hugging Face form."""

import functools
import math
import operator
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
from trials.model.family import Images, VisionModules
from trials.model.inputs.chat_encoder import chat_encoder
from trials.model.inputs.chat_template import chatml, default_template
from trials.model.inputs.corrected import shared_tiles
from trials.model.inputs.positions import counted_positions
from trials.model.inputs.processor import load_processor
from trials.model.refusals.heads import check_heads
from trials.model.shrunk import VOCABULARY, narrow, shorten
from trials.model.towers import tiles
from trials.model.towers.tiles import check_tile_numbers

AUTO_MODEL = AutoModelForImageTextToText
embed_vision = tiles.embed_vision
language_runner = decoder.language_runner
model_inputs = tiles.model_inputs
positions = counted_positions
vision_runner = tiles.vision_runner
OTHER_FORMS = {
    "internvl_chat": "it is InternVL in the form of its own remote code; give the Hugging Face form, of model_type "
    "'internvl', which OpenGVLab publishes under names that end in -hf, such as OpenGVLab/InternVL3-1B-hf"
}

# --- data side ----------------------------------------------------------------------------------------------------

# Pixels of a side; published models have 448.
_LARGEST_TILE = 4_480


def _load(path: str, config: PretrainedConfig, *, trust_remote_code: bool) -> Any:
    """Implement `Loader` (trials/model/inputs/processor.py); a folder without a chat template gets ChatML."""
    _check_tiles(config)
    processor = load_processor(path, config, trust_remote_code=trust_remote_code)
    _check_tiling(config, processor.image_processor)
    # Folders need not state it: it follows from the model.
    processor.image_seq_length = _tile_tokens(config)[1]
    if default_template(processor.chat_template, processor.tokenizer.chat_template) is None:
        processor.chat_template = chatml(processor.image_token)
    return processor


def _tile_tokens(config: Any) -> tuple[int, int]:
    """Return the tokens of one tile inside the vision tower, class token included, and in the language model."""
    vision = config.vision_config
    height, width = (size // patch for size, patch in zip(vision.image_size, vision.patch_size, strict=True))
    return height * width + 1, int(height * width * config.downsample_ratio**2)


class _Tiles(tiles.EqualTiles):
    """Implementation of `ImageInputs` (trials/model/inputs/chat_encoder.py): tiles between `<img>` and `</img>`."""

    def __init__(self, config: PretrainedConfig, processor: Any) -> None:
        self._processor = processor.image_processor
        self._around = processor.start_image_token_id, processor.end_image_token_id
        self._image_token = config.image_token_id
        self._features = _tile_tokens(config)[1]
        self.unit_shape = (3, *config.vision_config.image_size)

    def tokens(self, size: tuple[int, int], count: int) -> list[int]:
        """Return context tokens between the tokens that begin and end an image."""
        start, end = self._around
        # The count of an image's tokens includes both marks.
        return [start, *[self._image_token] * (count - 2), end]

    def pixels(
        self, images: Sequence[NDArray[np.uint8]], resized: Sequence[tuple[int, int] | None] = ()
    ) -> tuple[NDArray[np.float32], Ints]:
        """Return (tiles [tiles, 3, height, width], each image's thumbnail last, no grids)."""
        options = shared_tiles(self._processor, len(images))
        made = [
            self._processor([image], input_data_format="channels_last", return_tensors="np", **options)
            for image in images
        ]
        return np.concatenate([of_image["pixel_values"] for of_image in made], dtype=np.float32), NO_GRIDS


encoder = functools.partial(chat_encoder, inputs=_Tiles, positions=positions, load=_load)


def _check_tiling(config: Any, images: Any) -> None:
    """Raise ModelError for an image processor that makes other tiles than the tower takes."""
    made, taken = (images.size.height, images.size.width), tuple(config.vision_config.image_size)
    if made != taken:
        raise ModelError(
            f"the image processor makes tiles of {made} pixels but the model takes {taken}; correct `size` in "
            "preprocessor_config.json"
        )
    check_tile_numbers(images)


# --- model side ---------------------------------------------------------------------------------------------------


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is InternVL."""
    return bool(config.model_type == "internvl")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for another feature layer than the last, and for sizes that do not divide."""
    if config.vision_feature_layer != -1:
        raise ModelError(f"vision_feature_layer {config.vision_feature_layer} is not supported; only -1 is")
    _check_tiles(config)
    check_heads(config.vision_config, "vision")
    check_heads(config.get_text_config(), "language")
    vocabulary = config.get_text_config().vocab_size
    if vocabulary <= config.image_token_id:
        raise ModelError(
            f"image_token_id is {config.image_token_id} but the language model has {vocabulary} tokens; correct "
            "image_token_id or vocab_size in config.json"
        )


def _check_tiles(config: Any) -> None:
    """Raise ModelError for tiles that the tower cannot cut into patches, or the projector cannot merge."""
    vision, ratio = config.vision_config, config.downsample_ratio
    tile, patch = tuple(vision.image_size), tuple(vision.patch_size)
    if len(tile) != 2 or len(patch) != 2 or max(tile) > _LARGEST_TILE or any(map(operator.mod, tile, patch)):
        raise ModelError(
            f"tiles of {tile} pixels cannot be cut into patches of {patch}; correct image_size, two sizes up to "
            f"{_LARGEST_TILE}, or patch_size in the vision_config of config.json"
        )
    sides = [size // each for size, each in zip(tile, patch, strict=True)]
    if not 0 < ratio <= 1 or any((side * ratio) % 1 for side in sides) or sides[0] != sides[1]:
        raise ModelError(
            f"{sides[0]} x {sides[1]} patches of a tile cannot be merged with downsample_ratio {ratio}; it must leave "
            "whole numbers of a square, so correct downsample_ratio or image_size in config.json"
        )
    if vision.num_channels != 3:
        raise ModelError(f"num_channels is {vision.num_channels}, but images have 3; correct it in config.json")


def unit_flops(config: PretrainedConfig, *, tower: int, projector: int) -> float:
    """Count 2 operations for each parameter and token, and those of attention (Megatron-LM, appendix)."""
    vision = config.vision_config
    inside, outside = _tile_tokens(config)
    attention = 4 * vision.num_hidden_layers * inside**2 * vision.hidden_size
    return float(2 * tower * inside + attention + 2 * projector * outside)


def random_images(config: PretrainedConfig, units: int) -> Images:
    """Return tiles [units, 3, height, width] and their context tokens."""
    return tiles.random_tiles(config, units, (3, *config.vision_config.image_size), _tile_tokens(config)[1])


def vision_modules(model: PreTrainedModel) -> VisionModules:
    """Return the tower in parts."""
    tower = model.model.vision_tower
    return VisionModules(
        embedding=(tower.embeddings,),
        layers=tuple(tower.encoder.layer),
        behind=(tower.layernorm,),
        projector=(model.model.multi_modal_projector,),
    )


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return features [tiles x tokens, hidden]: class token dropped, pixels shuffled, projected."""
    last = model.model.vision_tower.layernorm(states[0])
    if model.config.vision_feature_select_strategy == "default":
        last = last[:, 1:, :]
    side = math.isqrt(last.shape[1])
    grid = last.reshape(last.shape[0], side, side, -1)
    shuffled = model.model.pixel_shuffle(grid, scale_factor=model.config.downsample_ratio)
    merged = shuffled.reshape(shuffled.shape[0], -1, shuffled.shape[-1])
    return (model.model.multi_modal_projector(merged).flatten(0, 1),)


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave the tower `layers` layers with at most two heads, and tiles of few patches."""
    vision, ratio = settings["vision_config"], settings["downsample_ratio"]
    shorten(vision, layers)
    narrow(vision)
    # At least two features in a row, so that a wrong order of them shows.
    side = next(side for side in range(2, _LARGEST_TILE) if side * ratio >= 2 and side * ratio % 1 == 0)
    vision["image_size"] = [side * size for size in vision["patch_size"]]
    settings["image_token_id"] = min(settings["image_token_id"], VOCABULARY - 1)
