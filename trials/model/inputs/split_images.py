"""Images as the processors of Idefics3 and Ovis2 split them into tiles, and what they write between the tiles."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers.models.idefics3.image_processing_pil_idefics3 import MAX_IMAGE_SIZE, get_resize_output_image_size

from trials.errors import ModelError

_MOST_IN_A_ROW = 20
"""Five times the tiles of the published models."""
OVIS_ATOM = "<IMG_ATOM>"
OVIS_MARKS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
"""Tokens of a feature in Ovis2, and around and between its tiles, in the order of visual_indicator_token_ids."""
TILE = len(OVIS_MARKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitImages:
    """The tiles and tokens of images, from their sizes. Unlike the processor, this travels between processes."""

    tokenizer: Any
    marks: tuple[str, str, str]
    """The tokens around tiles, of the whole image as a tile, and in place of a tile's features."""
    tile: int
    """Height and width of a tile in pixels."""
    longest: int
    """The longer side of an image in pixels before it is split."""
    splits: bool
    """Whether images are split; else each is one tile."""

    def layout(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return the (rows, columns) of tiles of an image of (height, width), (0, 0) where it is not split."""
        if not self.splits:
            return 0, 0
        like = np.broadcast_to(np.uint8(0), (1, *size))  # of this size, in one byte
        height, width = get_resize_output_image_size(like, resolution_max_side=self.longest)
        # As `resize_for_vision_encoder` does it: the longer side first, the other from what that has become.
        aspect = width / height
        if width >= height:
            columns = math.ceil(width / self.tile)
            rows = math.ceil(int(columns * self.tile / aspect) / self.tile)
        else:
            rows = math.ceil(height / self.tile)
            columns = math.ceil(int(rows * self.tile * aspect) / self.tile)
        return (rows, columns) if max(rows, columns) > 1 else (0, 0)

    def units(self, size: tuple[int, int]) -> int:
        """Return the tiles of an image, the whole image as a tile included."""
        rows, columns = self.layout(size)
        return rows * columns + 1

    def tokens(self, size: tuple[int, int], features: int) -> list[int]:
        """Return the tokens of an image, with `features` image tokens for each tile."""
        around, whole, image = self.marks
        rows, columns = self.layout(size)
        lines = (
            "".join(f"{around}<row_{row}_col_{column}>{image}" for column in _from_1(columns)) for row in _from_1(rows)
        )
        text = "".join(f"{line}\n" for line in lines) + "\n" * (rows > 0) + f"{around}{whole}{image}{around}"
        found: Sequence[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        token = self.tokenizer.convert_tokens_to_ids(image)
        return [each for one in found for each in ([one] * features if one == token else [one])]


def split_images(processor: Any) -> SplitImages:
    """Return how a processor splits images. Raise ModelError for one that splits them in another way."""
    images, tokenizer = processor.image_processor, processor.tokenizer
    tile, longest = images.max_image_size["longest_edge"], images.size["longest_edge"]
    if not images.do_resize or not isinstance(longest, int) or not isinstance(tile, int):
        raise ModelError(
            f"the image processor has do_resize {images.do_resize}, size {longest} and max_image_size {tile}; set "
            "do_resize to true, and the longest_edge of the others to whole numbers, in preprocessor_config.json"
        )
    if longest < 1 or tile < 1 or min(longest, MAX_IMAGE_SIZE) > _MOST_IN_A_ROW * tile:
        raise ModelError(
            f"images of {longest} pixels cannot be split into tiles of {tile}; correct size and max_image_size in "
            f"preprocessor_config.json, to {_MOST_IN_A_ROW} tiles in a row at most"
        )
    marks = (processor.fake_image_token, processor.global_image_tag, processor.image_token)
    names = ("fake_image_token", "global_image_token", "image_token")
    own = tuple(getattr(tokenizer, name, None) or mark for name, mark in zip(names, marks, strict=True))
    if own != marks:
        raise ModelError(f"the tokenizer has {own} for the tokens {marks} of images; take the model's own tokenizer")
    return SplitImages(
        tokenizer=tokenizer, marks=marks, tile=tile, longest=longest, splits=bool(images.do_image_splitting)
    )


def ovis_layout(rows: int, columns: int) -> list[int]:
    """Return what shows an image of a grid of tiles in Ovis2: numbers of OVIS_MARKS, and TILE for a tile's features.

    The whole image is first, and alone where the grid has one tile. Nothing shows a grid of 0 x 0.
    """
    start, whole, column, row, end = range(TILE)
    if not rows:
        return []
    tiles = [*[TILE, column] * (columns - 1), TILE, row] * rows
    return [start, TILE, whole, *(tiles[:-1] if rows * columns > 1 else ()), end]


def _from_1(count: int) -> range:
    return range(1, count + 1)
