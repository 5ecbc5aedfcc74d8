"""What families whose images are tiles of one size share."""

from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from trials.data.records.sample import NO_GRIDS
from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model.family import Images, LayerRunner

_MOST_TILES = 400
"""Most tiles of an image, thirty times the published models'; each rectangle up to it is tried."""


def random_tiles(config: PretrainedConfig, units: int, shape: tuple[int, ...], tokens: int) -> Images:
    """Return `units` tiles of this shape, each with as many image tokens."""
    return Images(
        pixels=torch.randn(units, *shape),
        grids=torch.from_numpy(NO_GRIDS),
        input_ids=torch.full((units * tokens,), config.image_token_id),
    )


def model_inputs(config: PretrainedConfig, input_ids: torch.Tensor, images: Images | None) -> dict[str, Any]:  # noqa: ARG001
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


def vision_runner(model: PreTrainedModel, states: torch.Tensor, tokens: PackTokens) -> LayerRunner:  # noqa: ARG001
    """Implement `Family.vision_runner` for towers in which each tile attends to itself."""

    def run(layer: nn.Module, number: int, states: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
        output = layer(states)
        result: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return result

    return run
