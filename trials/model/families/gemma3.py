"""Gemma 3: the tokens of an image attend to each other, and most language layers to a sliding window."""

import functools
import math
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from trials.arrays import Ints
from trials.data.records.sample import NO_GRIDS
from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model.attention.samples import PackedSamples
from trials.model.decoder import decoder_runner
from trials.model.family import Images, LayerRunner
from trials.model.inputs.chat_encoder import chat_encoder
from trials.model.inputs.positions import counted_positions
from trials.model.refusals.heads import check_heads
from trials.model.shrunk import VOCABULARY
from trials.model.towers import siglip, tiles
from trials.sharing.group import SharingGroup

AUTO_MODEL = AutoModelForImageTextToText
embed_vision = tiles.embed_vision
image_features = siglip.image_features
positions = counted_positions
vision_modules = siglip.vision_modules
vision_runner = siglip.vision_runner
OTHER_FORMS: dict[str, str] = {}
_SHRUNK_SIDE = 3
"""Tokens of an image in a row after shrinking: their square is above the shrunk sliding window."""


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is Gemma 3 with images."""
    return bool(config.model_type == "gemma3")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for another tower than SigLIP, for attention in both directions, and for sizes that disagree."""
    text = config.get_text_config()
    siglip.check_kind(config)
    if text.use_bidirectional_attention:
        raise ModelError(
            "use_bidirectional_attention is set, which is for embedding models; set it to false in the text_config of "
            "config.json"
        )
    if text.sliding_window is None or text.sliding_window < 1:
        raise ModelError(f"sliding_window is {text.sliding_window}; correct it in config.json, to 1 at least")
    siglip.check_tower(config)
    _check_pooling(config)
    siglip.check_tokens(config, "image_token_id", "boi_token_id", "eoi_token_id")
    check_heads(text, "language")


def _check_pooling(config: PretrainedConfig) -> None:
    """Raise ModelError for tokens of an image that are not the equal squares of its patches."""
    tokens, side = config.mm_tokens_per_image or 0, siglip.patches_in_a_row(config)
    pooled = math.isqrt(max(0, tokens))
    if pooled < 1 or pooled**2 != tokens or side % pooled:
        raise ModelError(
            f"{side} x {side} patches of an image cannot be pooled to {tokens} tokens, each of an equal square; "
            "correct mm_tokens_per_image, or image_size or patch_size in the vision_config of config.json"
        )


def unit_flops(config: PretrainedConfig, *, tower: int, projector: int) -> float:
    """Return the operations of one image."""
    return siglip.unit_flops(config, config.mm_tokens_per_image, tower=tower, projector=projector)


def random_images(config: PretrainedConfig, units: int) -> Images:
    """Return images [units, 3, height, width], each between its marks."""
    return Images(
        pixels=torch.randn(units, *siglip.unit_shape(config)),
        grids=torch.from_numpy(NO_GRIDS),
        input_ids=torch.tensor(_image_tokens(config) * units),
    )


def _image_tokens(config: PretrainedConfig) -> list[int]:
    return [config.boi_token_id, *[config.image_token_id] * config.mm_tokens_per_image, config.eoi_token_id]


def model_inputs(config: PretrainedConfig, input_ids: torch.Tensor, images: Images | None) -> dict[str, Any]:
    """Return the sample with where its images are: transformers has no blocks of attention without that."""
    types = (input_ids == config.image_token_id).long()[None]
    return tiles.model_inputs(config, input_ids, images) | {"token_type_ids": types}


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave `layers` layers, and images of a few tokens, which are pooled as before."""
    vision = settings["vision_config"]
    pooled = vision["image_size"] // vision["patch_size"] // math.isqrt(settings["mm_tokens_per_image"])
    siglip.shrink_tower(vision, layers, _SHRUNK_SIDE * pooled)
    settings["mm_tokens_per_image"] = _SHRUNK_SIDE**2
    names = ("image_token_index", "boi_token_index", "eoi_token_index")
    settings.update({name: VOCABULARY - 1 - number for number, name in enumerate(names)})


class ImageTokens(siglip.TileInputs):
    """Implementation of `ImageInputs`: an image is one tile."""

    def __init__(self, config: PretrainedConfig, processor: Any) -> None:
        """Raise ModelError for a processor that prepares images otherwise than the model takes them."""
        images = processor.image_processor
        if images.do_pan_and_scan:
            raise ModelError(
                f"do_pan_and_scan is {images.do_pan_and_scan}, but crops of images are not supported; set it to false "
                "in preprocessor_config.json"
            )
        super().__init__(config, images, (images.size.height, images.size.width))
        if processor.image_seq_length != config.mm_tokens_per_image:
            raise ModelError(
                f"image_seq_length is {processor.image_seq_length} in processor_config.json but mm_tokens_per_image "
                f"is {config.mm_tokens_per_image} in config.json; correct one of them"
            )
        self._tokens = _image_tokens(config)
        marks = (processor.tokenizer.boi_token_id, processor.tokenizer.eoi_token_id)
        if marks != (config.boi_token_id, config.eoi_token_id):
            raise ModelError(
                f"images stand between the tokens {marks} of the tokenizer, but boi_token_index and eoi_token_index "
                f"are {config.boi_token_id} and {config.eoi_token_id}; correct them in config.json"
            )

    def tokens(self, size: tuple[int, int], count: int) -> list[int]:
        """Return an image's tokens between its marks."""
        return self._tokens

    def blank(self, units: int) -> tuple[list[int], Ints]:
        """Return the tokens of `units` images, and no grids."""
        return self._tokens * units, NO_GRIDS


encoder = functools.partial(chat_encoder, inputs=ImageTokens, positions=positions)


def language_runner(
    model: PreTrainedModel, rotary: nn.Module, states: torch.Tensor, tokens: PackTokens, sharing: SharingGroup
) -> LayerRunner:
    """Run causal layers in which the tokens of one image attend to each other, too."""
    is_image = tokens.input_ids == model.config.image_token_id
    return decoder_runner(rotary, states, tokens, PackedSamples(tokens.lengths, image_blocks(is_image)), sharing)


def image_blocks(is_image: torch.Tensor) -> torch.Tensor:
    """Return the number of each token's image [T], -1 for text: neighbouring image tokens are one image."""
    before = torch.cat([is_image.new_zeros(1), is_image[:-1]])
    number = torch.cumsum(is_image & ~before, dim=0) - 1
    return torch.where(is_image, number, -1)
