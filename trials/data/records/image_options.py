"""Options of one image in a record: its prepared size, which some models can follow, and others, which none can."""

from collections.abc import Mapping
from typing import Any

from trials.data.records.images import MOST_PIXELS
from trials.data.records.record import RecordError
from trials.data.records.sample import ImageOptions

_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""As Qwen's messages have them."""
_CHANGING = (
    "total_pixels", "detail", "crop", "crop_box", "bbox", "bbox_2d", "box", "rotate", "rotation", "flip", "resize",
    "scale", "max_size", "image_max_pixels", "image_min_pixels", "min_patches", "max_patches", "max_num",
    "min_dynamic_patch", "max_dynamic_patch", "do_resize", "do_image_splitting", "do_pan_and_scan", "page", "frame",
)  # fmt: skip
"""Options under which an image would be another one, of Qwen's, OpenAI's and other messages."""
_NO_OPTION: Mapping[str, object] = {"detail": "auto"}
"""Values that leave an image as it is; null and false always do."""


def options_of(given: Mapping[str, Any], what: str) -> ImageOptions | None:
    """Return the options of the image that `given` describes, None where there are none. Raise RecordError."""
    for key in _CHANGING:
        if given.get(key) not in (None, False, _NO_OPTION.get(key)):
            raise RecordError(
                f"`{key}` of {what} would change the image, which is not supported for one image; change the image "
                "itself, or set what holds for all in the model's preprocessor_config.json"
            )
    sizes = {key: _checked(given[key], key, what) for key in _SIZES if given.get(key) is not None}
    if not sizes:
        return None
    _check_together(sizes, what)
    return ImageOptions(**sizes)


def _checked(value: object, key: str, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_PIXELS:
        raise RecordError(
            f"`{key}` of {what} is {repr(value)[:40]}; write a whole number of pixels from 1 to {MOST_PIXELS}"
        )
    return value


def _check_together(sizes: Mapping[str, int], what: str) -> None:
    """Raise RecordError for options that contradict each other, or of which one would not count."""
    height, width = (sizes.get(f"resized_{side}") for side in ("height", "width"))
    if (height is None) != (width is None):
        raise RecordError(f"{what} has one of `resized_height` and `resized_width`; write both, or neither")
    fewest, most = sizes.get("min_pixels"), sizes.get("max_pixels")
    if height and (fewest or most):
        raise RecordError(
            f"{what} has `resized_height` as well as `{'min_pixels' if fewest else 'max_pixels'}`, which would not "
            "count; keep one"
        )
    if fewest and most and fewest > most:
        raise RecordError(f"`min_pixels` of {what} is {fewest}, above its `max_pixels` {most}; correct one of them")
