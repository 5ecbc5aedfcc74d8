"""PaliGemma and PaliGemma 2: the tokens of images and prompt see each other, those of the answer all before them."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from trials.arrays import Ints
from trials.data.records.sample import IGNORED, NO_GRIDS, Encoded, Sample
from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model.attention.samples import PackedSamples
from trials.model.decoder import decoder_runner
from trials.model.family import Images, LayerRunner, prompt_types
from trials.model.inputs.chat_encoder import ChatEncoder, chat_encoder
from trials.model.refusals.heads import check_heads
from trials.model.shrunk import VOCABULARY
from trials.model.towers import siglip, tiles
from trials.sharing.group import SharingGroup

AUTO_MODEL = AutoModelForImageTextToText
embed_vision = tiles.embed_vision
image_features = siglip.image_features
vision_modules = siglip.vision_modules
vision_runner = siglip.vision_runner
OTHER_FORMS: dict[str, str] = {}
_SHRUNK_SIDE = 3
"""Patches of an image in a row after shrinking: their square is above the shrunk sliding window."""


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is PaliGemma, with whichever language model."""
    return bool(config.model_type == "paligemma")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for another tower than SigLIP, and for sizes that disagree."""
    text = config.get_text_config()
    siglip.check_kind(config)
    siglip.check_tower(config)
    siglip.check_tokens(config, "image_token_id")
    if config.projection_dim != text.hidden_size:
        raise ModelError(
            f"projection_dim is {config.projection_dim}, but the language model's hidden_size is {text.hidden_size}; "
            "correct one of them in config.json"
        )
    check_heads(text, "language")


def _tile_tokens(config: PretrainedConfig) -> int:
    return siglip.patches_in_a_row(config) ** 2


def unit_flops(config: PretrainedConfig, *, tower: int, projector: int) -> float:
    """Return the operations of one image."""
    return siglip.unit_flops(config, _tile_tokens(config), tower=tower, projector=projector)


def random_images(config: PretrainedConfig, units: int) -> Images:
    """Return images [units, 3, height, width] and their tokens."""
    return tiles.random_tiles(config, units, siglip.unit_shape(config), _tile_tokens(config))


def positions(config: PretrainedConfig, input_ids: Ints, grids: Ints, seconds: Sequence[float] | None = None) -> Ints:
    """Return places from 1, and 0 for the tokens of the prompt, 1 for others, [2, tokens].

    Ids do not show where an answer begins, of which an encoder knows. Here a prompt ends with its last image, or else
    in the middle.
    """
    shown = np.flatnonzero(input_ids == config.image_token_id)
    return _placed(len(input_ids), int(shown[-1]) + 1 if len(shown) else len(input_ids) // 2)


def _placed(tokens: int, prompt: int) -> Ints:
    places = np.arange(tokens, dtype=np.int64)
    return np.stack([places + 1, places >= prompt])


def model_inputs(config: PretrainedConfig, input_ids: torch.Tensor, images: Images | None) -> dict[str, Any]:
    """Return the sample with the tokens of its prompt as `positions` has them."""
    placed = torch.from_numpy(positions(config, input_ids.cpu().numpy(), NO_GRIDS)).to(input_ids.device)
    return tiles.model_inputs(config, input_ids, images) | prompt_types(placed)


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave `layers` layers with at most two heads, and images of a few patches."""
    siglip.shrink_tower(settings["vision_config"], layers, _SHRUNK_SIDE)
    settings["projection_dim"] = settings["text_config"]["hidden_size"]
    settings["image_token_index"] = VOCABULARY - 1


class PromptEncoder(ChatEncoder):
    """Encoder whose positions say where the answer begins; without one, all of a sample is its prompt."""

    def encode(self, sample: Sample, *, pixels: bool, kept: bytes = b"") -> Encoded:
        encoded = super().encode(sample, pixels=pixels, kept=kept)
        if not pixels:
            return encoded
        targets, tokens = np.flatnonzero(encoded.labels != IGNORED), len(encoded.labels)
        return replace(encoded, positions=_placed(tokens, int(targets[0]) if len(targets) else tokens))


def _inputs(config: PretrainedConfig, processor: Any) -> siglip.OneTileInputs:
    """Raise ModelError for a processor that prepares images otherwise than the model takes them."""
    features = _tile_tokens(config)
    if processor.image_seq_length != features:
        raise ModelError(
            f"image_seq_length is {processor.image_seq_length} in preprocessor_config.json but the model makes "
            f"{features} features of an image; correct it"
        )
    return siglip.OneTileInputs(config, processor.image_processor, features)


encoder = functools.partial(chat_encoder, inputs=_inputs, positions=positions, kind=PromptEncoder)


def language_runner(
    model: PreTrainedModel, rotary: nn.Module, states: torch.Tensor, tokens: PackTokens, sharing: SharingGroup
) -> LayerRunner:
    """Run causal layers in which the tokens of a prompt see each other, too, whatever the sliding window."""
    places, is_answer = tokens.positions
    samples = PackedSamples(tokens.lengths, -is_answer, beyond_window=True)
    return decoder_runner(rotary, states, replace(tokens, positions=places[None]), samples, sharing)
