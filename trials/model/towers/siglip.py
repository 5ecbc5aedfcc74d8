"""What families share whose vision tower is SigLIP: square tiles of one size, each of which attends to itself."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from trials.arrays import Ints
from trials.data.records.sample import NO_GRIDS
from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model.family import LayerRunner, VisionModules
from trials.model.refusals.heads import check_heads
from trials.model.shrunk import narrow, shorten
from trials.model.towers.tiles import EqualTiles

_LARGEST_TILE = 4_480
"""Five times the tiles of Gemma 3, which are the largest of the published models."""


def check_kind(config: PretrainedConfig) -> None:
    """Raise ModelError for another tower."""
    kind = config.vision_config.model_type
    if kind != "siglip_vision_model":
        raise ModelError(
            f"the vision model is {kind!r}, but models of type {config.model_type!r} have 'siglip_vision_model'; "
            "correct the vision_config of config.json"
        )


def check_tower(config: PretrainedConfig) -> None:
    """Raise ModelError for a tower that cannot be built, or whose tiles are too large."""
    vision = config.vision_config
    tile, patch = vision.image_size, vision.patch_size
    if not (isinstance(tile, int) and isinstance(patch, int) and 1 <= patch <= tile <= _LARGEST_TILE):
        raise ModelError(
            f"tiles of {tile} pixels cannot be cut into patches of {patch}; correct image_size, one number up to "
            f"{_LARGEST_TILE}, or patch_size in the vision_config of config.json"
        )
    if vision.num_channels != 3:
        raise ModelError(f"num_channels is {vision.num_channels}, but images have 3; correct it in config.json")
    check_heads(vision, "vision")


def check_tokens(config: PretrainedConfig, *names: str) -> None:
    """Raise ModelError for ids of these names that are not in the vocabulary."""
    vocabulary = config.get_text_config().vocab_size
    for name in names:
        number = getattr(config, name)
        if not isinstance(number, int) or not 0 <= number < vocabulary:
            raise ModelError(
                f"{name} is {number} but the language model has {vocabulary} tokens; correct {name} or vocab_size in "
                "config.json"
            )


def patches_in_a_row(config: PretrainedConfig) -> int:
    """Return the square root of the tokens of one tile inside the tower. Pixels beyond whole patches are not seen."""
    return int(config.vision_config.image_size // config.vision_config.patch_size)


def unit_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """Return (3, height, width) of a tile."""
    size = config.vision_config.image_size
    return 3, size, size


def unit_flops(config: PretrainedConfig, tokens: int, *, tower: int, projector: int) -> float:
    """Count 2 operations for each parameter and token, and those of attention (Megatron-LM, appendix).

    `tokens` are those of one tile in the language model.
    """
    vision, inside = config.vision_config, patches_in_a_row(config) ** 2
    attention = 4 * vision.num_hidden_layers * inside**2 * vision.hidden_size
    return float(2 * tower * inside + attention + 2 * projector * tokens)


def vision_modules(model: PreTrainedModel) -> VisionModules:
    """Return the tower in parts."""
    return tower_modules(model.model.vision_tower, model.model.multi_modal_projector)


def tower_modules(tower: Any, projector: nn.Module) -> VisionModules:
    """Return a tower in parts; its pooling head, if any, is not used."""
    return VisionModules(
        embedding=(tower.embeddings,),
        layers=tuple(tower.encoder.layers),
        behind=(tower.post_layernorm,),
        projector=(projector,),
        unused=(tower.head,) if tower.use_head else (),
    )


def vision_runner(model: PreTrainedModel, states: torch.Tensor, tokens: PackTokens) -> LayerRunner:
    """Implement `Family.vision_runner`. No tile is padded, so that no mask is needed."""

    def run(layer: nn.Module, number: int, states: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer(states, None)
        return result

    return run


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return projected features [tiles x features, hidden]."""
    features = model.model.multi_modal_projector(model.model.vision_tower.post_layernorm(states[0]))
    return (features.flatten(0, -2),)


def shrink_tower(vision: dict[str, Any], layers: int, side: int) -> None:
    """Leave the tower `layers` layers with at most two heads, and tiles of `side` x `side` patches, in place."""
    shorten(vision, layers)
    narrow(vision)
    vision["image_size"] = side * vision["patch_size"]


class TileInputs(EqualTiles):
    """What implementations of `ImageInputs` share whose units are tiles that an image processor makes."""

    def __init__(self, config: PretrainedConfig, images: Any, made: Any) -> None:
        """`images` is the image processor, which says that its tiles have `made` as (height, width).

        Raise ModelError where that is not what the model takes.
        """
        check_tower(config)
        self.unit_shape = unit_shape(config)
        self._images = images
        if tuple(made) != self.unit_shape[1:]:
            raise ModelError(
                f"the image processor makes tiles of {made} pixels but the model takes {self.unit_shape[1:]}; correct "
                "preprocessor_config.json"
            )
        pixels, _ = self.pixels([np.zeros((5, 7, 3), dtype=np.uint8)])
        if pixels.shape[1:] != self.unit_shape or not np.isfinite(pixels).all():
            raise ModelError(
                f"the image processor makes {pixels.shape[1:]} numbers of an image where the model takes "
                f"{self.unit_shape}, or some that are not finite; correct preprocessor_config.json"
            )

    def pixels(
        self, images: Sequence[NDArray[np.uint8]], resized: Sequence[tuple[int, int] | None] = ()
    ) -> tuple[NDArray[np.float32], Ints]:
        """Return (pixels [tiles, 3, height, width], no grids) of one sample's images [height, width, 3]."""
        made = [
            np.asarray(self._images([image], input_data_format="channels_last", return_tensors="np")["pixel_values"])
            for image in images
        ]
        tiles = [of_image.reshape(-1, *of_image.shape[-3:]) for of_image in made]
        return np.concatenate(tiles, dtype=np.float32), NO_GRIDS


class OneTileInputs(TileInputs):
    """Implementation of `ImageInputs` where an image is one tile, shown as its image tokens alone."""

    def __init__(self, config: PretrainedConfig, images: Any, features: int) -> None:
        """`features` are those that the model makes of a tile. Raise ModelError as `TileInputs` does."""
        super().__init__(config, images, (images.size.height, images.size.width))
        self._image_token = config.image_token_id
        self._features = features

    def tokens(self, size: tuple[int, int], count: int) -> list[int]:
        """Return `count` image tokens."""
        return [self._image_token] * count
