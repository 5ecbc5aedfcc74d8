"""Cohere2 Vision: tiles with the whole image last, a line break behind each, and squares of patches that are merged."""

import functools
from typing import Any

from transformers import AutoModelForImageTextToText, PretrainedConfig

from trials.errors import ModelError
from trials.model import decoder
from trials.model.family import Images
from trials.model.inputs.chat_encoder import chat_encoder
from trials.model.inputs.positions import counted_positions
from trials.model.refusals.heads import check_heads
from trials.model.shrunk import VOCABULARY
from trials.model.towers import siglip, tiles
from trials.model.towers.tiles import check_tile_numbers

AUTO_MODEL = AutoModelForImageTextToText
embed_vision = tiles.embed_vision
image_features = siglip.image_features
language_runner = decoder.language_runner
model_inputs = tiles.model_inputs
positions = counted_positions
vision_modules = siglip.vision_modules
vision_runner = siglip.vision_runner
OTHER_FORMS: dict[str, str] = {}
_SHRUNK_WIDTH = 128
"""Most of the projector's inner width in a shrunk model."""


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is Cohere2 Vision."""
    return bool(config.model_type == "cohere2_vision")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for another tower than SigLIP, and for patches that cannot be merged in squares."""
    siglip.check_kind(config)
    siglip.check_tower(config)
    siglip.check_tokens(config, "image_token_id")
    check_heads(config.get_text_config(), "language")
    side, factor, width = siglip.patches_in_a_row(config), config.downsample_factor, config.alignment_intermediate_size
    if factor < 1 or side % factor:
        raise ModelError(
            f"{side} x {side} patches of a tile cannot be merged in squares of downsample_factor {factor}; correct it, "
            "or image_size or patch_size of the vision_config, in config.json"
        )
    if width < 2 or width % 2:
        raise ModelError(
            f"alignment_intermediate_size is {width}, of which one half multiplies the other; correct it in "
            "config.json to an even number above 0"
        )


def _tile_tokens(config: PretrainedConfig) -> int:
    """Return the image tokens of one tile."""
    return (siglip.patches_in_a_row(config) // int(config.downsample_factor)) ** 2


def unit_flops(config: PretrainedConfig, *, tower: int, projector: int) -> float:
    """Return the operations of one tile."""
    return siglip.unit_flops(config, _tile_tokens(config), tower=tower, projector=projector)


def random_images(config: PretrainedConfig, units: int) -> Images:
    """Return tiles [units, 3, height, width] and their image tokens."""
    return tiles.random_tiles(config, units, siglip.unit_shape(config), _tile_tokens(config))


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave the tower `layers` layers with at most two heads, tiles of four features, and a narrow projector."""
    siglip.shrink_tower(settings["vision_config"], layers, 2 * settings["downsample_factor"])
    settings["alignment_intermediate_size"] = min(settings["alignment_intermediate_size"], _SHRUNK_WIDTH)
    settings["image_token_id"] = min(settings["image_token_id"], VOCABULARY - 1)


class _BrokenTiles(siglip.TileInputs):
    """Implementation of `ImageInputs` (trials/model/inputs/chat_encoder.py): a line break behind each tile."""

    def __init__(self, config: PretrainedConfig, processor: Any) -> None:
        """Raise ModelError for a processor whose tiles or tokens differ from the model's."""
        images, tokenizer = processor.image_processor, processor.tokenizer
        self._image_token = config.image_token_id
        self._features = _tile_tokens(config)
        self._marks: list[int] = tokenizer.convert_tokens_to_ids(
            [processor.boi_token, processor.img_line_break_token, processor.eoi_token]
        )
        if images.patch_size**2 != self._features:
            raise ModelError(
                f"patch_size of the image processor is {images.patch_size}, by which a tile has "
                f"{images.patch_size**2} tokens, but the model makes {self._features} features of it; correct it in "
                "preprocessor_config.json"
            )
        check_tile_numbers(images)
        super().__init__(config, images, (images.size.height, images.size.width))

    def tokens(self, size: tuple[int, int], count: int) -> list[int]:
        """Return the image tokens of all tiles, with the tokens around them."""
        start, line_break, end = self._marks
        tile = [self._image_token] * self._features + [line_break]
        return [start, *tile * ((count - 2) // len(tile)), end]


encoder = functools.partial(chat_encoder, inputs=_BrokenTiles, positions=positions)
