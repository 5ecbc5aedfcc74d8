"""InternVL in its Hugging Face form."""

import math
import operator
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from trials.data.records.images import image_pixels, image_size
from trials.data.records.sample import (
    IGNORED,
    IMAGE,
    NO_GRIDS,
    NO_VIDEOS,
    Clip,
    Encoded,
    Ints,
    Lengths,
    Measured,
    Sample,
    kept_tokens,
)
from trials.data.tokens import PackTokens
from trials.errors import DataError, ModelError
from trials.model.decoder import language_runner
from trials.model.family import Images, VisionModules
from trials.model.inputs.digest import model_digest
from trials.model.inputs.preprocessing import check_vocabulary, load_image_processor, load_tokenizer
from trials.model.positions import counted_positions as positions
from trials.model.refusals.heads import check_heads
from trials.model.shrunk import VOCABULARY, narrow, shorten
from trials.model.skeleton import load_config
from trials.model.towers.tiles import model_inputs, vision_runner

__all__ = [
    "AUTO_MODEL",
    "OTHER_FORMS",
    "check",
    "embed_vision",
    "encoder",
    "image_features",
    "language_runner",
    "model_inputs",
    "positions",
    "random_images",
    "shrink_vision",
    "takes",
    "unit_flops",
    "vision_modules",
    "vision_runner",
]

# --- data side ----------------------------------------------------------------------------------------------------

_TURN_START, _TURN_END = "<|im_start|>", "<|im_end|>"
_LARGEST_TILE = 4_480
_MOST_TILES = 400
"""Most tiles of an image. Both limits are ten times the published models'; each rectangle up to it is tried."""

Piece: TypeAlias = tuple[list[int], bool]
"""Some tokens, and whether they are targets."""


def encoder(model_path: str, trust_remote_code: bool = False, max_tokens: int | None = None) -> "Encoder":
    """Return the encoder of a model folder, which cuts samples to `max_tokens`.

    Raise ModelError for a folder that is not in InternVL's Hugging Face form.
    """
    config = load_config(model_path, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(model_path, trust_remote_code=trust_remote_code)
    images = load_image_processor(model_path, trust_remote_code=trust_remote_code)
    return Encoder(config, tokenizer, images, max_tokens)


def _tile_tokens(config: Any) -> tuple[int, int]:
    """Return the tokens of one tile inside the vision tower, class token included, and in the language model."""
    vision = config.vision_config
    height, width = (size // patch for size, patch in zip(vision.image_size, vision.patch_size, strict=True))
    return height * width + 1, int(height * width * config.downsample_ratio**2)


class Encoder:
    """Encoder of conversations as ChatML, with `<img>`, context tokens and `</img>` for each image.

    Targets are the answers to learn and the `<|im_end|>` after each. Text that spells a special token stays text. Of n
    images in a sample each gets 1/n of the most tiles, as InternVL trains (`max_dynamic_patch // n`).
    """

    def __init__(self, config: Any, tokenizer: Any, images: Any, max_tokens: int | None = None) -> None:
        """Raise ModelError where the configuration, the tokenizer and the image processor disagree."""
        if not tokenizer.is_fast:
            raise ModelError("the tokenizer is not in its fast form; save it with its tokenizer.json")
        _check_tiles(config)
        self._tokenizer = tokenizer
        # Asked itself, it takes half the time; a limit or padding that was saved with it would count then.
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._images = images
        self._max_tokens = max_tokens
        self._digest = model_digest(type(self), config, tokenizer, images, max_tokens)
        _, self._tokens_per_tile = _tile_tokens(config)
        self._image_start, self._context, self._image_end = (
            self._token_id(getattr(tokenizer, f"{name}_token", None), f"{name}_token")
            for name in ("start_image", "context_image", "end_image")
        )
        self._turn_start, self._turn_end = (self._token_id(token, token) for token in (_TURN_START, _TURN_END))
        # Features replace the model's image token, so that the encoder must write the same one.
        if self._context != config.image_token_id:
            raise ModelError(f"the tokenizer's image token is {self._context}, the model's is {config.image_token_id}")
        check_vocabulary(config, tokenizer)
        self._unit_shape = _tile_shape(config, images)
        _check_processor(images, self._options(1))
        own = {self._image_start, self._context, self._image_end, self._turn_start, self._turn_end}
        added = tokenizer.added_tokens_decoder.items()
        spelled = sorted({str(token) for number, token in added if token.special or number in own})
        # Lookahead: each place where a text spells a special token is found, without consuming it.
        self._spelled = re.compile(f"(?={'|'.join(map(re.escape, spelled))})")
        self._break = self._text("\n")
        self._assistant = self._text("assistant\n")

    @property
    def pad_token_id(self) -> int:
        pad = self._tokenizer.pad_token_id
        return self._turn_end if pad is None else int(pad)

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """(3, height, width) of a tile."""
        return self._unit_shape

    @property
    def digest(self) -> str:
        return self._digest

    @property
    def max_tokens(self) -> int | None:
        return self._max_tokens

    @property
    def no_videos(self) -> str:
        return NO_VIDEOS

    @property
    def no_end(self) -> None:
        return None

    def measure(
        self,
        sample: Sample,
        image_sizes: tuple[tuple[int, int], ...],
        clips: tuple[Clip, ...] = (),  # noqa: ARG002
    ) -> Measured:
        tiles = self._tiles(image_sizes)
        input_ids, is_target = self._tokens(sample, tiles)
        return Measured(
            lengths=Lengths(
                vision_units=sum(tiles), text_tokens=len(input_ids), target_tokens=int(np.count_nonzero(is_target))
            )
        )

    def encode(self, sample: Sample, *, pixels: bool) -> Encoded:
        input_ids, is_target = self._tokens(sample, self._tiles(tuple(image_size(image) for image in sample.images)))
        return Encoded(
            input_ids=input_ids,
            labels=np.where(is_target, input_ids, IGNORED),
            positions=np.arange(len(input_ids))[None],
            pixel_values=self._pixels(sample) if pixels and sample.images else None,
            grids=NO_GRIDS,
        )

    def blank(self, lengths: Lengths, *, pixels: bool) -> Encoded:
        input_ids = np.full(lengths.text_tokens, self.pad_token_id, dtype=np.int64)
        input_ids[: lengths.vision_units * self._tokens_per_tile] = self._context
        shape = (lengths.vision_units, *self._unit_shape)
        return Encoded(
            input_ids=input_ids,
            labels=np.full_like(input_ids, IGNORED),
            positions=np.arange(len(input_ids))[None],
            pixel_values=np.zeros(shape, dtype=np.float32) if pixels and lengths.vision_units else None,
            grids=NO_GRIDS,
        )

    def pieces(self, units: int, grids: Ints) -> Ints:  # noqa: ARG002
        return np.ones(units, dtype=np.int64)

    def _tokens(self, sample: Sample, tiles: Sequence[int]) -> tuple[Ints, NDArray[np.bool_]]:
        """Return token ids, and which of them are targets, both [tokens], cut to `max_tokens`."""
        if sample.videos:
            raise DataError(NO_VIDEOS)
        pieces = list(self._pieces(sample, tiles))
        input_ids = np.array([token for tokens, _ in pieces for token in tokens], dtype=np.int64)
        is_target = np.repeat([is_target for _, is_target in pieces], [len(tokens) for tokens, _ in pieces])
        # A sample is never cut inside an image: its features would have no tokens.
        image_ends = np.flatnonzero(input_ids == self._image_end) + 1
        kept = kept_tokens(len(input_ids), int(image_ends[-1]) if len(image_ends) else 0, self._max_tokens)
        return input_ids[:kept], is_target[:kept]

    def _pieces(self, sample: Sample, tiles: Sequence[int]) -> Iterator[Piece]:
        shown = iter(tiles)
        for turn in sample.turns:
            yield [self._turn_start], False
            match turn.role:
                case "assistant":
                    # Apart from its text, as it is when the model is asked to go on from here.
                    yield self._assistant, False
                    yield [*self._text(turn.text), self._turn_end], turn.is_learnt
                case "user":
                    first, *others = f"user\n{turn.text}".split(IMAGE)
                    yield self._text(first), False
                    for text in others:
                        context = [self._context] * (self._tokens_per_tile * next(shown))
                        yield [self._image_start, *context, self._image_end, *self._text(text)], False
                    yield [self._turn_end], False
                case "system":
                    yield [*self._text(f"system\n{turn.text}"), self._turn_end], False
            yield self._break, False

    def _text(self, text: str) -> list[int]:
        # A cut behind the first character of a spelled special token keeps the tokenizer from seeing it.
        cuts = [0, *(match.start() + 1 for match in self._spelled.finditer(text)), len(text)]
        parts = (text[start:end] for start, end in pairwise(cuts))
        return [token for part in parts for token in self._backend.encode(part, add_special_tokens=False).ids]

    def _token_id(self, token: str | None, what: str) -> int:
        found = self._tokenizer.get_vocab().get(token)
        if found is None:
            raise ModelError(f"the tokenizer has no {what}; use a model folder in InternVL's Hugging Face form")
        return int(found)

    def _options(self, images: int) -> dict[str, Any]:
        """Return the options by which the image processor cuts each image of a sample with `images` of them."""
        return {"crop_to_patches": True, "max_patches": max(1, self._images.max_patches // max(1, images))}

    def _tiles(self, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Return the tiles of each image, thumbnail included, from (height, width)."""
        options = self._options(len(sizes))
        return [int(self._images.get_number_of_image_patches(*size, options)) for size in sizes]

    def _pixels(self, sample: Sample) -> NDArray[np.float32]:
        """Return the pixels [tiles, 3, height, width], each image's thumbnail last."""
        options = self._options(len(sample.images))
        tiles = [
            self._images([image_pixels(image)], input_data_format="channels_last", return_tensors="np", **options)
            for image in sample.images
        ]
        return np.concatenate([of_image["pixel_values"] for of_image in tiles], dtype=np.float32)


def _tile_shape(config: Any, images: Any) -> tuple[int, int, int]:
    """Return (3, height, width). Raise ModelError where the tower takes another size than the image processor makes."""
    if not hasattr(images, "get_number_of_image_patches"):
        raise ModelError(f"{type(images).__name__} does not cut images into tiles; InternVL uses GotOcr2ImageProcessor")
    made, taken = (images.size.height, images.size.width), tuple(config.vision_config.image_size)
    if made != taken:
        raise ModelError(
            f"the image processor makes tiles of {made} pixels but the model takes {taken}; correct `size`"
        )
    return 3, *made


def _check_processor(images: Any, options: dict[str, Any]) -> None:
    fewest, most = images.min_patches, images.max_patches
    if not 1 <= fewest <= most <= _MOST_TILES:
        raise ModelError(
            f"the image processor cuts images into {fewest} to {most} tiles; correct min_patches and max_patches to "
            f"numbers from 1 to {_MOST_TILES}"
        )
    picture = np.zeros((5, 7, 3), dtype=np.uint8)
    pixels = images([picture], input_data_format="channels_last", return_tensors="np", **options)["pixel_values"]
    if pixels.shape[1:] != (3, images.size.height, images.size.width) or not np.isfinite(pixels).all():
        raise ModelError(
            f"the image processor makes {pixels.shape[1:]} numbers of an image, or some that are not finite; correct "
            "preprocessor_config.json"
        )


# --- model side ---------------------------------------------------------------------------------------------------


AUTO_MODEL = AutoModelForImageTextToText
OTHER_FORMS = {
    "internvl_chat": "it is InternVL in the form of its own remote code; give the Hugging Face form, of model_type "
    "'internvl', which OpenGVLab publishes under names that end in -hf, such as OpenGVLab/InternVL3-1B-hf"
}


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
    pixels = torch.randn(units, config.vision_config.num_channels, *config.vision_config.image_size)
    context = torch.full((units * _tile_tokens(config)[1],), config.image_token_id)
    return Images(pixels=pixels, grids=torch.from_numpy(NO_GRIDS), input_ids=context)


def vision_modules(model: PreTrainedModel) -> VisionModules:
    """Return the tower in parts; its last norm belongs to the projector, so that a stage may end with any layer."""
    tower = model.model.vision_tower
    return VisionModules(
        embedding=(tower.embeddings,),
        layers=tuple(tower.encoder.layer),
        projector=(tower.layernorm, model.model.multi_modal_projector),
    )


def embed_vision(model: PreTrainedModel, pixels: torch.Tensor, tokens: PackTokens) -> torch.Tensor:  # noqa: ARG001
    """Return vision states [tiles, patches + 1, hidden] of pixels [tiles, 3, height, width]."""
    states: torch.Tensor = model.model.vision_tower.embeddings(pixels.to(model.dtype))
    return states


def image_features(
    model: PreTrainedModel,
    states: Sequence[torch.Tensor],
    tokens: PackTokens,  # noqa: ARG001
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
    side = next(side for side in range(2, _LARGEST_TILE) if side * ratio >= 2 and side * ratio % 1 == 0)
    vision["image_size"] = [side * size for size in vision["patch_size"]]
    settings["image_token_id"] = min(settings["image_token_id"], VOCABULARY - 1)
