"""What families share that cut an image into crops, by the resolution of a list that fits it best (AnyRes, LLaVA-NeXT).

A grid is (units, height, width): the units of an image and its size in pixels. Of several units the first is the whole
image, and the others are its crops, row by row. A grid (units, 0, 0) stands for units that no token shows, and a grid
(frames, -1, -1) for a video.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate
from transformers import PretrainedConfig
from transformers.image_processing_utils import select_best_resolution
from transformers.models.llava_next.modeling_llava_next import unpad_image

from trials.arrays import Ints
from trials.errors import ModelError
from trials.model.family import Images
from trials.model.inputs.processor import check_counts
from trials.model.towers.clip_towers import (
    check_preparation,
    check_tile,
    check_tower,
    tile_features,
)

Size: TypeAlias = tuple[int, int]
"""(height, width) in pixels."""
Packer: TypeAlias = Callable[[PretrainedConfig, torch.Tensor, Size, torch.Tensor], torch.Tensor]
"""(configuration, features [units, features, hidden] of an image, its size, newline [hidden]) -> its features
[features, hidden] in the order of its tokens, line ends included. The size of an image of one unit does not count.
"""
_SCALED_DOWN = 1.1
"""Features whose sides are at most this multiple of those of the most crops are not scaled, as published."""
_MOST_CROPS = 400
"""Of one image, ten times the published models'; and entries of image_grid_pinpoints."""


def check_crops(config: PretrainedConfig) -> None:
    """Raise ModelError for a tower or resolutions whose crops do not make up an image."""
    check_tower(config)
    side, features = patches_per_side(config), tile_features(config)
    if features != side**2:
        raise ModelError(
            f"a crop of {side} x {side} patches has {features} features with vision_feature_select_strategy "
            f"{config.vision_feature_select_strategy!r}, so that crops cannot be joined; set it to 'default' for a "
            "CLIP tower, to 'full' for a SigLIP tower"
        )
    tile, given = config.vision_config.image_size, config.image_grid_pinpoints
    if not isinstance(given, list) or not 1 <= len(given) <= _MOST_CROPS:
        raise ModelError(f"image_grid_pinpoints must be a list of 1 to {_MOST_CROPS} resolutions; correct config.json")
    for each in given:
        is_pair = isinstance(each, list | tuple) and len(each) == 2 and all(isinstance(size, int) for size in each)
        if not is_pair or min(each) < tile or any(size % tile for size in each):
            raise ModelError(
                f"{str(each)[:60]} in image_grid_pinpoints is no (height, width) in multiples of image_size {tile}; "
                "correct it in config.json"
            )
        if each[0] * each[1] > _MOST_CROPS * tile**2:
            raise ModelError(
                f"{each} in image_grid_pinpoints cuts an image into more than {_MOST_CROPS} crops of {tile}; correct "
                "it in config.json"
            )


def patches_per_side(config: PretrainedConfig) -> int:
    """Return the patches in a row of a crop."""
    return int(config.vision_config.image_size // config.vision_config.patch_size)


def shown_features(
    pack: Packer, config: PretrainedConfig, features: torch.Tensor, newline: torch.Tensor, grids: torch.Tensor
) -> torch.Tensor:
    """Return the features [features, hidden] that image tokens take, from units' features [units, features, hidden]."""
    rows: list[list[int]] = grids.tolist()
    parts = features.split([units for units, _, _ in rows])
    # A unit that no token shows stays in the graph, and the newline with it: each rank has every gradient.
    images = [part if height else part[:1] for part, (_, height, _) in zip(parts, rows, strict=True)]
    packed = (
        pack(config, part, (height, width), newline) for part, (_, height, width) in zip(images, rows, strict=True)
    )
    return torch.cat([each if height else each[:0] for each, (_, height, _) in zip(packed, rows, strict=True)])


def in_rows(
    config: PretrainedConfig,
    features: torch.Tensor,
    size: Size,
    newline: torch.Tensor,
    most_crops: int | None = None,
) -> torch.Tensor:
    """Implement `Packer`: the whole image, then the rows of all its crops together without padding, each with its end.

    Features of more than `most_crops` crops are scaled down to this number. The models' own functions do the same, and
    let the host wait for a copy to the device.
    """
    whole, end = features[0], newline.to(features.dtype)
    if len(features) == 1:
        return torch.cat([whole, end[None]])
    side, tile = patches_per_side(config), config.vision_config.image_size
    height, width = select_best_resolution(size, config.image_grid_pinpoints)
    crops = features[1:].view(height // tile, width // tile, side, side, -1)
    grid = unpad_image(crops.permute(4, 0, 2, 1, 3).flatten(1, 2).flatten(2, 3), size)
    rows, columns = grid.shape[1:]
    ratio = math.sqrt(rows * columns / (most_crops * side**2)) if most_crops else 1.0
    if ratio > _SCALED_DOWN:
        smaller = [int(rows // ratio), int(columns // ratio)]
        grid = interpolate(grid[None], smaller, mode="bilinear")[0]
    ends = end[:, None, None].expand(-1, grid.shape[1], 1)
    return torch.cat([whole, torch.cat([grid, ends], dim=2).flatten(1).T])


def random_images(config: PretrainedConfig, units: int, pack: Packer, *, crops_several: bool) -> Images:
    """Return images with `units` units in all: one or, with `crops_several`, several cut ones, and whole ones."""
    grids = torch.tensor(_random_grids(config, units, crops_several))
    tile = config.vision_config.image_size
    return Images(
        pixels=torch.randn(units, 3, tile, tile),
        grids=grids,
        input_ids=torch.full((_count(pack, config, grids),), config.image_token_id),
    )


def _random_grids(config: PretrainedConfig, units: int, crops_several: bool) -> list[tuple[int, int, int]]:
    sizes, tile = _size_of_units(config), config.vision_config.image_size
    grids, left = list[tuple[int, int, int]](), units
    while left:
        fitting = [number for number in sizes if number == left or (crops_several and number + min(sizes) <= left)]
        if not fitting:
            break
        grids.append((max(fitting), *sizes[max(fitting)]))
        left -= max(fitting)
    return grids + [(1, tile, tile)] * left


def _size_of_units(config: PretrainedConfig) -> dict[int, Size]:
    """Return a size of images for each number of units, with padding around the image where there is one."""
    pinpoints = config.image_grid_pinpoints
    found: dict[int, Size] = {}
    for height, width in pinpoints:
        sizes = ((3 * height // 4, width), (height, 3 * width // 4), (height, width))
        chosen = [size for size in sizes if tuple(select_best_resolution(size, pinpoints)) == (height, width)]
        if chosen:
            found[_units(config, chosen[0])] = chosen[0]
    return found


def _units(config: PretrainedConfig, size: Size) -> int:
    height, width = select_best_resolution(size, config.image_grid_pinpoints)
    return 1 + int(height * width // config.vision_config.image_size**2)


def _count(pack: Packer, config: PretrainedConfig, grids: torch.Tensor) -> int:
    """Return the number of features that image tokens take."""
    features = torch.zeros(int(grids[:, 0].sum()), tile_features(config), 1)
    return len(shown_features(pack, config, features, torch.zeros(1), grids))


class CropInputs:
    """Implementation of `ImageInputs` (trials/model/inputs/chat_encoder.py) for processors that crop images."""

    def __init__(self, config: PretrainedConfig, processor: Any, *, pack: Packer) -> None:
        """Raise ModelError for a processor whose crops or tokens differ from the model's."""
        self._processor = processor.image_processor
        self._image_token: int = config.image_token_id
        tile = config.vision_config.image_size
        self.unit_shape = (3, tile, tile)
        check_preparation(self._processor)
        made, taken = self._processor.image_grid_pinpoints, config.image_grid_pinpoints
        if list(map(list, made)) != list(map(list, taken)):
            raise ModelError(
                f"image_grid_pinpoints of the image processor are {str(made)[:60]} but those of the model are "
                f"{str(taken)[:60]}; correct preprocessor_config.json"
            )
        for height, width in ((5, 7), (tile, tile)):
            pixels, grids = self.pixels([np.zeros((height, width, 3), dtype=np.uint8)])
            check_tile(config, pixels)
            check_counts(processor, {(height, width): _count(pack, config, torch.from_numpy(grids))})
        check_counts(
            processor,
            {
                size: _count(pack, config, torch.tensor([[units, *size]]))
                for units, size in _size_of_units(config).items()
            },
        )

    def tokens(self, size: Size, count: int) -> list[int]:
        """Return `count` image tokens."""
        return [self._image_token] * count

    def pixels(
        self, images: Sequence[NDArray[np.uint8]], resized: Sequence[tuple[int, int] | None] = ()
    ) -> tuple[NDArray[np.float32], Ints]:
        """Return (pixels [units, 3, height, width], grids [images, 3])."""
        sizes = [image.shape[:2] for image in images]
        # Without padding, which would fill up each image to the most units of the sample.
        made = self._processor([list(images)], input_data_format="channels_last", do_pad=False)["pixel_values"]
        grids = [[len(units), *size] for units, size in zip(made, sizes, strict=True)]
        return np.concatenate(made, dtype=np.float32), np.array(grids, dtype=np.int64)

    def blank(self, units: int) -> tuple[list[int], Ints]:
        """Return the grid of units that no token shows."""
        return [], np.array([[units, 0, 0]], dtype=np.int64)

    def pieces(self, units: int, grids: Ints) -> Ints:
        """Return the tiles of each image, and the frames of each video."""
        return grids[:, 0]
