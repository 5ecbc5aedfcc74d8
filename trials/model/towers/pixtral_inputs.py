"""Images of models with a Pixtral tower: rows of image tokens, and the patches of each image."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig

from trials.arrays import Ints
from trials.errors import ModelError
from trials.model.towers.pixtral_tower import unit_shape


class PixtralInputs:
    """Implementation of `ImageInputs` (trials/model/inputs/chat_encoder.py)."""

    def __init__(self, config: PretrainedConfig, processor: Any) -> None:
        """Raise ModelError for a processor whose patches differ from the model's."""
        self._processor = processor
        self._size, self._side = config.vision_config.patch_size, getattr(config, "spatial_merge_size", 1)
        self.unit_shape = unit_shape(config, self._side**2)
        made, taken = (processor.patch_size, processor.spatial_merge_size), (self._size, self._side)
        if made != taken:
            raise ModelError(
                f"the processor makes patches of (size, merged) {made} but the model takes {taken}; correct patch_size "
                "and spatial_merge_size in processor_config.json"
            )
        expected = (3, *(length * processor.unit_side for length in processor.shape((5, 7))))
        pixels = self._processed(np.zeros((5, 7, 3), dtype=np.uint8))
        if pixels.shape != expected or not np.isfinite(pixels).all():
            raise ModelError(
                f"the image processor makes {pixels.shape} numbers of an image of 5 x 7 pixels, or some that are not "
                f"finite; correct preprocessor_config.json to make {expected}"
            )

    def tokens(self, size: tuple[int, int], count: int) -> list[int]:
        """Return rows of image tokens, each with a break behind it, and an end behind the last, where it has these."""
        rows, columns = self._processor.shape(size)
        if count == rows * columns:
            return [self._processor.image_token_id] * count
        row = [self._processor.image_token_id] * columns + [self._processor.image_break_token_id]
        return [*(row * rows)[:-1], self._processor.image_end_token_id]

    def pixels(
        self, images: Sequence[NDArray[np.uint8]], resized: Sequence[tuple[int, int] | None] = ()
    ) -> tuple[NDArray[np.float32], Ints]:
        """Return (pixels [units, *unit_shape], grids [images, 2])."""
        made = [self._processed(image) for image in images]
        grids = np.array([(each.shape[1] // self._size, each.shape[2] // self._size) for each in made], dtype=np.int64)
        units = [self._units(each, rows, columns) for each, (rows, columns) in zip(made, grids.tolist(), strict=True)]
        return np.concatenate(units, dtype=np.float32), grids

    def blank(self, units: int) -> tuple[list[int], Ints]:
        """Return the tokens and the grid of one image of `units` units in a row."""
        grid = [[self._side, self._side * units]]
        return [self._processor.image_token_id] * units, np.array(grid, dtype=np.int64)

    def pieces(self, units: int, grids: Ints) -> Ints:
        """Return the merged patches of each image."""
        pieces: Ints = grids.prod(axis=1) // self._side**2
        return pieces

    def _processed(self, image: NDArray[np.uint8]) -> NDArray[Any]:
        """Return [3, height, width] of one image; together images would be padded to the largest."""
        made = self._processor.image_processor(
            [image], patch_size=self._processor.unit_side, input_data_format="channels_last", return_tensors="np"
        )
        pixels: NDArray[Any] = made["pixel_values"][0]
        return pixels

    def _units(self, image: NDArray[Any], rows: int, columns: int) -> NDArray[Any]:
        """Return the patches of an image [3, height, width], row after row, as units."""
        parts = image.reshape(image.shape[0], rows, self._size, columns, self._size)
        return parts.transpose(1, 3, 0, 2, 4).reshape(-1, *self.unit_shape)
