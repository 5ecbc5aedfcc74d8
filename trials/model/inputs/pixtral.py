"""The processor of models with a Pixtral tower."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.processing_utils import MultiModalData, ProcessorMixin

from trials.errors import ModelError


class PixtralProcessor(ProcessorMixin):
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

    @classmethod
    def from_args_and_dict(cls, args: Any, processor_dict: dict[str, Any], **_: Any) -> "PixtralProcessor":
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


def _token_id(tokenizer: Any, token: str) -> int:
    if token not in tokenizer.get_vocab():
        raise ModelError(f"the tokenizer has no {token}; take the tokenizer that the model was saved with")
    return int(tokenizer.convert_tokens_to_ids(token))
