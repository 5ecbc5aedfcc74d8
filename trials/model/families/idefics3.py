"""Idefics3 and SmolVLM: images are split into tiles, with the place of each tile written before it."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model import decoder
from trials.model.family import Images, VisionModules
from trials.model.inputs.chat_encoder import chat_encoder
from trials.model.inputs.positions import counted_positions
from trials.model.inputs.split_images import split_images
from trials.model.refusals.heads import check_heads
from trials.model.shrunk import VOCABULARY
from trials.model.towers import siglip, tiles

AUTO_MODEL = AutoModelForImageTextToText
language_runner = decoder.language_runner
positions = counted_positions
vision_runner = siglip.vision_runner
OTHER_FORMS: dict[str, str] = {}
_SHRUNK_SIDE = 2
"""Tokens of a tile in a row after shrinking."""


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is Idefics3 or SmolVLM, which has the same structure."""
    return config.model_type in ("idefics3", "smolvlm")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for sizes that disagree."""
    siglip.check_tower(config)
    side, scale = siglip.patches_in_a_row(config), config.scale_factor
    if scale < 1 or side % scale:
        raise ModelError(
            f"{side} x {side} patches of a tile cannot be merged in squares with a scale_factor of {scale}; correct "
            "scale_factor, or image_size or patch_size in the vision_config of config.json"
        )
    siglip.check_tokens(config, "image_token_id")
    check_heads(config.get_text_config(), "language")


def _tile_tokens(config: PretrainedConfig) -> int:
    """Return the image tokens of one tile."""
    return (siglip.patches_in_a_row(config) // int(config.scale_factor)) ** 2


def unit_flops(config: PretrainedConfig, *, tower: int, projector: int) -> float:
    """Return the operations of one tile."""
    return siglip.unit_flops(config, _tile_tokens(config), tower=tower, projector=projector)


def random_images(config: PretrainedConfig, units: int) -> Images:
    """Return tiles [units, 3, height, width] and their image tokens."""
    return tiles.random_tiles(config, units, siglip.unit_shape(config), _tile_tokens(config))


def model_inputs(config: PretrainedConfig, input_ids: torch.Tensor, images: Images | None) -> dict[str, Any]:
    """Return the sample with its tiles [1, tiles, 3, height, width]."""
    return {"input_ids": input_ids[None], "pixel_values": images.pixels[None] if images else None}


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave `layers` layers, and tiles of a few tokens, each of as many patches as before."""
    siglip.shrink_tower(settings["vision_config"], layers, _SHRUNK_SIDE * settings["scale_factor"])
    settings["image_token_id"] = VOCABULARY - 1


class TileTokens(siglip.TileInputs):
    """Implementation of `ImageInputs`: an image is its tiles, row by row, and the whole image as the last one."""

    def __init__(self, config: PretrainedConfig, processor: Any) -> None:
        """Raise ModelError for a processor whose tiles differ from the model's."""
        self._split = split_images(processor)
        super().__init__(config, processor.image_processor, (self._split.tile, self._split.tile))
        self._features, self._image_token = _tile_tokens(config), config.image_token_id
        if processor.image_seq_len != self._features:
            raise ModelError(
                f"image_seq_len is {processor.image_seq_len} in processor_config.json but a tile has {self._features} "
                "tokens in the model; correct image_seq_len, or scale_factor in config.json"
            )

    def tokens(self, size: tuple[int, int], count: int) -> list[int]:
        """Return the tokens of all tiles, with the text between them."""
        return self._split.tokens(size, self._features)


encoder = functools.partial(chat_encoder, inputs=TileTokens, positions=positions)


def vision_modules(model: PreTrainedModel) -> VisionModules:
    """Return the tower in parts."""
    tower = model.model.vision_model
    return VisionModules(
        embedding=(tower.embeddings,),
        layers=tuple(tower.encoder.layers),
        behind=(tower.post_layernorm,),
        projector=(model.model.connector,),
    )


def embed_vision(model: PreTrainedModel, pixels: torch.Tensor, tokens: PackTokens) -> torch.Tensor:
    """Return vision states [tiles, patches, hidden] of pixels [tiles, 3, height, width]."""
    tower = model.model.vision_model
    side = pixels.shape[-1] // tower.patch_size
    # The processor makes every tile full, so that no patch is padding.
    full = torch.ones(len(pixels), side, side, dtype=torch.bool, device=pixels.device)
    states: torch.Tensor = tower.embeddings(pixels.to(model.dtype), full)
    return states


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return features [tiles x tokens, hidden]."""
    features = model.model.connector(model.model.vision_model.post_layernorm(states[0]))
    return (features.flatten(0, 1),)
