"""The processors of models with a Pixtral tower."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from transformers.image_processing_utils import get_size_dict
from transformers.models.lighton_ocr.processing_lighton_ocr import LightOnOcrProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.processing_utils import MultiModalData, ProcessorMixin

from trials.errors import ModelError


class _MergedPatches(ProcessorMixin):
    """What becomes of an image that is scaled to whole tokens of a square of patches."""

    patch_size: int
    spatial_merge_size: int
    image_processor: Any

    @classmethod
    def from_args_and_dict(cls, args: Any, processor_dict: dict[str, Any], **_: Any) -> Self:
        parts = ("image_processor", "tokenizer")
        return cls(*args, **{name: value for name, value in processor_dict.items() if name not in parts})

    @property
    def unit_side(self) -> int:
        """Pixels of a side of what becomes one token."""
        return self.patch_size * self.spatial_merge_size

    def shape(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return (rows, columns) of image tokens for an image of (height, width) pixels.

        Raise ValueError for an image that would have no row or no column.
        """
        edge, side = self.image_processor.size["longest_edge"], self.unit_side
        # Only the shape of this image is read: it takes no memory.
        picture = np.broadcast_to(np.zeros((), dtype=np.uint8), (*size, 3))
        height, width = get_resize_output_image_size(picture, edge, side, input_data_format="channels_last")
        if not height or not width:
            raise ValueError(f"shrunk to {edge} pixels it would have a side of 0 pixels")
        return height // side, width // side


class PixtralProcessor(_MergedPatches):
    """Replacement of transformers' processor of this name, which cannot be had without torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **settings: Any) -> None:
        """`settings` are those of processor_config.json."""
        super().__init__(image_processor, tokenizer, chat_template=settings.get("chat_template"))  # type: ignore[no-untyped-call]
        self.patch_size: int = settings.get("patch_size", 16)
        self.spatial_merge_size: int = settings.get("spatial_merge_size", 1)
        self.image_token, self.image_break_token, self.image_end_token = (
            settings.get(name, token)
            for name, token in (
                ("image_token", "[IMG]"),
                ("image_break_token", "[IMG_BREAK]"),
                ("image_end_token", "[IMG_END]"),
            )
        )
        self.image_token_id, self.image_break_token_id, self.image_end_token_id = (
            _token_id(tokenizer, token) for token in (self.image_token, self.image_break_token, self.image_end_token)
        )

    def replace_image_token(self, image_inputs: dict[str, Any], image_idx: int, **_: Any) -> str:
        height, width = (int(size) // self.unit_side for size in image_inputs["image_sizes"][image_idx])
        row = self.image_token * width + self.image_break_token
        return f"{(row * height).removesuffix(self.image_break_token)}{self.image_end_token}"

    def _process_images(self, images: Any, **options: Any) -> Any:
        options["patch_size"] = self.unit_side
        return super()._process_images(images, **options)

    def _get_num_multimodal_tokens(self, image_sizes: Sequence[tuple[int, int]]) -> MultiModalData:
        shapes = [self.shape(size) for size in image_sizes]
        return MultiModalData(
            num_image_tokens=[rows * (columns + 1) for rows, columns in shapes],
            num_image_patches=[rows * columns for rows, columns in shapes],
        )


class LightOnProcessor(_MergedPatches, LightOnOcrProcessor):  # type: ignore[misc]
    """LightOnOCR's processor, which shows nothing between the rows of an image."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, **settings: Any) -> None:
        """Raise ModelError for a tokenizer or an image processor of another model."""
        for name in ("image_token", "image_break_token", "image_end_token"):
            _token_id(tokenizer, getattr(tokenizer, name, name))
        super().__init__(image_processor, tokenizer, **settings)  # type: ignore[no-untyped-call]
        made = get_size_dict(image_processor.patch_size)
        if set(made.values()) != {self.unit_side}:
            raise ModelError(
                f"the image processor scales images to multiples of {made}, of which not all are whole squares of "
                f"{self.spatial_merge_size} x {self.spatial_merge_size} patches of {self.patch_size} pixels; set "
                f"patch_size in preprocessor_config.json to {self.unit_side}"
            )

    def _get_num_multimodal_tokens(self, image_sizes: Sequence[tuple[int, int]], **_: Any) -> MultiModalData:
        counts = [rows * columns for rows, columns in map(self.shape, image_sizes)]
        return MultiModalData(num_image_tokens=counts, num_image_patches=counts)


def _token_id(tokenizer: Any, token: str) -> int:
    if token not in tokenizer.get_vocab():
        raise ModelError(f"the tokenizer has no {token}; take the tokenizer that the model was saved with")
    return int(tokenizer.convert_tokens_to_ids(token))
