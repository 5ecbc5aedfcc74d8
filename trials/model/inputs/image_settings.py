"""Settings of an image processor of transformers, checked before it is asked anything."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from PIL import Image as Pillow
from transformers import (
    Idefics3ImageProcessorPil,
    PixtralImageProcessorPil,
    Qwen2VLImageProcessorPil,
    SmolVLMImageProcessorPil,
)
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import SizeDict
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

from trials.errors import ModelError

FILE = "preprocessor_config.json"
# A choice: a setting comes from a file and may be of any length.
_SHOWN = 60
_LARGEST = 1 << 24
"""Of edges that images are scaled up to, or of pixels where a processor reads an edge as their number."""
_SWITCHES = (
    "do_resize", "do_rescale", "do_normalize", "do_convert_rgb", "do_pad", "do_center_crop", "do_image_splitting",
    "do_pan_and_scan", "crop_to_patches",
)  # fmt: skip
_SIZES = ("size", "crop_size", "pad_size", "max_image_size")
_BY_AREA = (Qwen2VLImageProcessorPil, Glm4vImageProcessorPil, PaddleOCRVLImageProcessorPil)
_BY_LONGEST = (Idefics3ImageProcessorPil, SmolVLMImageProcessorPil, PixtralImageProcessorPil)
_NEEDED = ("size", "patch_size", "merge_size", "temporal_patch_size", "min_patches", "max_patches")
"""Settings that are no null in a class that has values for them."""
_COUNTS = ("patch_size", "merge_size", "temporal_patch_size", "min_patches", "max_patches", "min_size")


def check_image_settings(images: Any) -> None:
    """Raise ModelError for a setting of the image processor that cannot be followed, with its value.

    Other processors than those of transformers know other settings, and are not looked at.
    """
    kind: Any = type(images)
    if not issubclass(kind, PilBackend):
        return
    for names, is_right, expected in _RULES:
        for name in names:
            value, default = getattr(images, name, None), getattr(kind, name, None)
            # What a class does not declare, it does not read.
            is_read = hasattr(kind, name)
            is_missing = value is None and (default is None or name not in _NEEDED)
            if is_read and not is_missing and not is_right(value):
                raise _wrong(name, value, expected)
    if images.do_resize is False and kind.do_resize:
        raise _wrong("do_resize", False, "true: images of all sizes are prepared for one model")
    if images.do_normalize:
        _check_normalisation(images)
    if issubclass(kind, _BY_AREA):
        _check_bounds(images.size)
    elif issubclass(kind, _BY_LONGEST) and not (images.size and images.size.longest_edge):
        raise _wrong("size", images.size, "a longest_edge, to which images are scaled")


def _check_normalisation(images: Any) -> None:
    for name in ("image_mean", "image_std"):
        value = getattr(images, name)
        is_three = isinstance(value, list | tuple) and len(value) == 3 and all(map(_is_number, value))
        if not is_three and not _is_number(value):
            raise _wrong(name, value, "3 numbers")
    deviations = images.image_std if isinstance(images.image_std, list | tuple) else [images.image_std]
    if any(abs(value) < 1e-6 for value in deviations):
        raise _wrong("image_std", images.image_std, "3 numbers of which none is 0, since values are divided by them")


def _check_bounds(size: Any) -> None:
    """Raise ModelError for a `size` that does not bound the pixels of an image in its own resolution."""
    fewest, most = (size.shortest_edge, size.longest_edge) if size else (None, None)
    if not fewest or not most or fewest > most:
        raise _wrong(
            "size", size, "a shortest_edge and a longest_edge, the fewest and most pixels of an image, in this order"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value: object) -> bool:
    if isinstance(value, SizeDict | dict):
        return _is_size(value)
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_size(value: object) -> bool:
    lengths = dict(value) if isinstance(value, SizeDict | Mapping) else {}
    return bool(lengths) and all(_is_count(length) for length in lengths.values()) and _is_allowed(lengths)


def _is_allowed(lengths: Mapping[str, int]) -> bool:
    return all(length <= _LARGEST for name, length in lengths.items() if not name.startswith(("longest", "max_")))


_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_SWITCHES, lambda value: isinstance(value, bool), "true or false"),
    (_SIZES, _is_size, f"edges in whole numbers from 1 to {_LARGEST}"),
    (_COUNTS, _is_count, "a whole number above 0"),
    (("rescale_factor",), lambda value: _is_number(value) and value != 0, "a number other than 0, such as 1/255"),
    (
        ("resample",),
        lambda value: not isinstance(value, bool) and value in tuple(Pillow.Resampling),
        f"one of Pillow's numbers, {min(Pillow.Resampling):d} to {max(Pillow.Resampling):d}",
    ),
)


def shown_setting(value: object) -> str:
    """Return a setting for a message."""
    shown = ascii(dict(value) if isinstance(value, SizeDict) else value)
    return shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."


def _wrong(name: str, value: object, expected: str) -> ModelError:
    shown = shown_setting(value)
    return ModelError(f"{name} of the image processor is {shown}, which has to be {expected}; correct it in {FILE}")
