"""What families whose images are tiles of one size share."""

from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from trials.arrays import Ints
from trials.data.records.sample import NO_GRIDS
from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model.family import Images, LayerRunner

_MOST_TILES = 400
"""Most tiles of an image, thirty times the published models'; each rectangle up to it is tried."""


class EqualTiles:
    """What implementations of `ImageInputs` (trials/model/inputs/chat_encoder.py) share whose units are tiles."""

    _image_token: int
    _features: int
    """Image tokens of a tile."""

    def blank(self, units: int) -> tuple[list[int], Ints]:
        """Return the image tokens of `units` tiles, and no grids."""
        return [self._image_token] * (units * self._features), NO_GRIDS

    def pieces(self, units: int, grids: Ints) -> Ints:
        """Return a piece for each tile."""
        return np.ones(units, dtype=np.int64)


def random_tiles(config: PretrainedConfig, units: int, shape: tuple[int, ...], tokens: int) -> Images:
    """Return `units` tiles of this shape, each with as many image tokens."""
    return Images(
        pixels=torch.randn(units, *shape),
        grids=torch.from_numpy(NO_GRIDS),
        input_ids=torch.full((units * tokens,), config.image_token_id),
    )


def model_inputs(config: PretrainedConfig, input_ids: torch.Tensor, images: Images | None) -> dict[str, Any]:
    """Implement `Family.model_inputs` for models that take tiles [tiles, 3, height, width]."""
    return {"input_ids": input_ids[None], "pixel_values": images.pixels if images else None}


def check_tile_numbers(images: Any) -> None:
    """Raise ModelError for an image processor that cuts images into no tiles, or into too many."""
    fewest, most = images.min_patches, images.max_patches
    if not 1 <= fewest <= most <= _MOST_TILES:
        raise ModelError(
            f"the image processor cuts images into {fewest} to {most} tiles; correct min_patches and max_patches to "
            f"numbers from 1 to {_MOST_TILES}"
        )


def embed_vision(model: PreTrainedModel, pixels: torch.Tensor, tokens: PackTokens) -> torch.Tensor:
    """Return vision states [tiles, tokens, hidden] of pixels [tiles, 3, height, width]."""
    states: torch.Tensor = model.model.vision_tower.embeddings(pixels.to(model.dtype))
    return states


def vision_runner(model: PreTrainedModel, states: torch.Tensor, tokens: PackTokens) -> LayerRunner:
    """Implement `Family.vision_runner` for towers in which each tile attends to itself."""

    def run(layer: nn.Module, number: int, states: torch.Tensor) -> torch.Tensor:
        output = layer(states)
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result

    return run
