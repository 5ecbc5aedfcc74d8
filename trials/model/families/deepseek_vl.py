"""DeepSeek-VL: one tile for each image, and a feature for each of its patches."""

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
from trials.model.refusals.heads import check_heads
from trials.model.shrunk import VOCABULARY
from trials.model.towers import siglip, tiles

AUTO_MODEL = AutoModelForImageTextToText
language_runner = decoder.language_runner
model_inputs = tiles.model_inputs
positions = counted_positions
vision_runner = siglip.vision_runner
OTHER_FORMS = {
    "multi_modality": "it is DeepSeek-VL or Janus in the form of its own code; give the Hugging Face form of "
    "DeepSeek-VL, of model_type 'deepseek_vl', such as deepseek-community/deepseek-vl-1.3b-chat"
}
_SHRUNK_SIDE = 2


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is DeepSeek-VL with one vision tower."""
    return bool(config.model_type == "deepseek_vl")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for another tower than SigLIP, and for sizes that make no sense."""
    siglip.check_kind(config)
    siglip.check_tower(config)
    siglip.check_tokens(config, "image_token_id")
    check_heads(config.get_text_config(), "language")


def _tile_tokens(config: PretrainedConfig) -> int:
    return siglip.patches_in_a_row(config) ** 2


def unit_flops(config: PretrainedConfig, *, tower: int, projector: int) -> float:
    """Return the operations of one image."""
    return siglip.unit_flops(config, _tile_tokens(config), tower=tower, projector=projector)


def random_images(config: PretrainedConfig, units: int) -> Images:
    """Return images [units, 3, height, width] and their tokens."""
    return tiles.random_tiles(config, units, siglip.unit_shape(config), _tile_tokens(config))


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave the tower `layers` layers with at most two heads, and images of four patches."""
    siglip.shrink_tower(settings["vision_config"], layers, _SHRUNK_SIDE)
    settings["image_token_id"] = min(settings["image_token_id"], VOCABULARY - 1)


def _inputs(config: PretrainedConfig, processor: Any) -> siglip.OneTileInputs:
    """Raise ModelError for a processor that prepares images otherwise than the model takes them."""
    features = _tile_tokens(config)
    if processor.num_image_tokens != features:
        raise ModelError(
            f"num_image_tokens is {processor.num_image_tokens} in processor_config.json but the model makes "
            f"{features} features of an image; correct it"
        )
    return siglip.OneTileInputs(config, processor.image_processor, features)


encoder = functools.partial(chat_encoder, inputs=_inputs, positions=positions)


def vision_modules(model: PreTrainedModel) -> VisionModules:
    """Return the tower in parts."""
    return siglip.tower_modules(model.model.vision_model, model.model.aligner)


def embed_vision(model: PreTrainedModel, pixels: torch.Tensor, tokens: PackTokens) -> torch.Tensor:
    """Return vision states [images, patches, hidden] of pixels [images, 3, height, width]."""
    states: torch.Tensor = model.model.vision_model.embeddings(pixels.to(model.dtype))
    return states


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return features [images x patches, hidden]."""
    features = model.model.aligner(model.model.vision_model.post_layernorm(states[0]))
    return (features.flatten(0, 1),)
