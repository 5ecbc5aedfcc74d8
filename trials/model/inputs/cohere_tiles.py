"""Tiles of Cohere2 Vision, whose image processor transformers has for torchvision alone."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import interpolate
from transformers import GotOcr2ImageProcessorPil
from transformers.image_utils import SizeDict

_MODES = {2: "bilinear", 3: "bicubic"}
"""Names in torch of Pillow's numbers for resampling."""


class Cohere2VisionImageProcessorPil(GotOcr2ImageProcessorPil):
    """Replacement of transformers' processor of this name, which resizes with the same function of torch.

    It is GOT-OCR2's, as the original is, with another number of tiles.
    """

    size = {"height": 512, "width": 512}  # noqa: RUF012 (transformers reads it so)
    crop_to_patches = True
    patch_size = 16
    """Features in a row of a tile."""

    def resize(  # type: ignore[override]  # of the options, it gets these alone
        self, image: NDArray[np.uint8], size: Any, resample: int | None = None
    ) -> NDArray[np.uint8]:
        """Return an image [3, height, width] in another size. Raise ValueError for a filter that is not followed."""
        if resample not in _MODES:
            raise ValueError(f"resample is {resample}, but images of this model are resized by 2 or 3")
        # A copy, since torch takes no array that cannot be written.
        pixels, shape = torch.from_numpy(image.copy())[None], (size.height, size.width)
        made = interpolate(pixels, size=shape, mode=_MODES[resample], align_corners=False, antialias=True)
        return made[0].numpy()

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the (rows, columns) of tiles for which an image is scaled up least, or else down least."""
        size: Any = self.size
        side, most = size.height, self.max_patches
        grids = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
        grids.sort(key=lambda grid: grid[0] * grid[1])
        scales = [min(columns * side / width, rows * side / height) for rows, columns in grids]
        wanted = min((scale for scale in scales if scale >= 1), default=max(scales))
        return grids[scales.index(wanted)]

    def crop_image_to_patches(  # type: ignore[override]  # of the options, it gets these alone
        self, image: NDArray[np.uint8], *_: Any, patch_size: Any, resample: int | None = None
    ) -> list[NDArray[np.uint8]]:
        """Return the tiles [3, height, width] of an image, row by row, and the whole image last where it was cut."""
        rows, columns = self.grid(*image.shape[-2:])
        size = SizeDict(height=rows * patch_size.height, width=columns * patch_size.width)
        whole = self.resize(image, size, resample)
        tiles = [tile for row in np.split(whole, rows, axis=1) for tile in np.split(row, columns, axis=2)]
        return [*tiles, self.resize(image, patch_size, resample)] if len(tiles) > 1 else tiles

    def get_number_of_image_patches(
        self, height: int, width: int, images_kwargs: Mapping[str, Any] | None = None
    ) -> int:
        """Return the tiles of an image, the whole image included: the settings alone say how it is cut."""
        rows, columns = self.grid(height, width) if self.crop_to_patches else (1, 1)
        return 1 + rows * columns if rows * columns > 1 else 1
