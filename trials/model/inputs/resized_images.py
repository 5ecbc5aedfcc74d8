"""Sizes to which options of a record resize one image, for processors that take an image in its own resolution."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import Qwen2VLImageProcessorPil
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import SizeDict
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from trials.data.records.images import MOST_PIXELS
from trials.data.records.sample import NO_OPTIONS, ImageOptions
from trials.errors import DataError

_FEWEST_TOKENS, _MOST_TOKENS = 4, 16_384
"""Of an image whose resized height and width are stated, as in the function `fetch_image` of qwen-vl-utils."""


def unit_side(images: Any) -> int:
    """Return the pixels of a side of what becomes one token."""
    return int(images.patch_size * images.merge_size)


def resized_size(images: Any, size: tuple[int, int], options: ImageOptions) -> tuple[int, int]:
    """Return the (height, width) to which an image of `size` is resized by the image processor `images`.

    Bounds on pixels are those of a call of the processor with them. Raise DataError for a processor that does not
    resize so, and for a size that it refuses.
    """
    if type(images) is not Qwen2VLImageProcessorPil:
        raise DataError(NO_OPTIONS)
    side = unit_side(images)
    if options.resized_height and options.resized_width:
        size = options.resized_height, options.resized_width
        fewest, most = _FEWEST_TOKENS * side**2, _MOST_TOKENS * side**2
    else:
        fewest = options.min_pixels or images.size["shortest_edge"]
        most = options.max_pixels or images.size["longest_edge"]
    try:
        height, width = smart_resize(*size, factor=side, min_pixels=fewest, max_pixels=most)
    except (ValueError, ArithmeticError) as error:
        raise DataError(f"the model's processor refuses an image of {size[1]} x {size[0]} pixels: {error}") from error
    # Where the model's own bound contradicts a single one, the processor follows one of them.
    kept = height * width <= max(most, side**2) if options.max_pixels else height * width >= fewest
    if fewest > most and not kept:
        raise DataError(
            f"an image would have {height * width} pixels, because its own bounds and the model's are {fewest} to "
            f"{most}; give it both min_pixels and max_pixels"
        )
    if height * width > MOST_PIXELS:
        raise DataError(
            f"an image would be resized to {width} x {height} pixels by its options, more than the {MOST_PIXELS} that "
            "are taken; correct them"
        )
    return height, width


def resized_pixels(images: Any, image: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return an image [height, width, 3] in the (height, width) of `size`, resized as `images` itself does it."""
    height, width = size
    # The processor's own method would choose another size; this is the one that it calls then.
    made = PilBackend.resize(
        images, image.transpose(2, 0, 1), SizeDict(height=height, width=width), resample=images.resample
    )
    return np.asarray(made.transpose(1, 2, 0))
