"""Images of models with a Pixtral tower: rows of image tokens, and the patches of each image."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig
from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size
from transformers.processing_utils import MultiModalData, ProcessorMixin

from trials.data.records.sample import Ints
from trials.errors import ModelError
from trials.model.pixtral_tower import unit_shape


class PixtralProcessor(ProcessorMixin):
    """Stands for transformers' processor of this name, which cannot be had without torchvision."""

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


class PixtralInputs:
    """Implements `ImageInputs` (trials/model/inputs/chat_encoder.py)."""

    def __init__(self, config: PretrainedConfig, processor: Any) -> None:
        """Raise ModelError for a processor whose patches are not those of the model."""
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

    def tokens(self, size: tuple[int, int], count: int) -> list[int]:  # noqa: ARG002 (the Protocol has it)
        """Return rows of image tokens, each with a break behind it, and an end behind the last."""
        rows, columns = self._processor.shape(size)
        row = [self._processor.image_token_id] * columns + [self._processor.image_break_token_id]
        return [*(row * rows)[:-1], self._processor.image_end_token_id]

    def pixels(self, images: Sequence[NDArray[np.uint8]]) -> tuple[NDArray[np.float32], Ints]:
        """Return (pixels [units, *unit_shape], grids [images, 2])."""
        made = [self._processed(image) for image in images]
        grids = np.array([(each.shape[1] // self._size, each.shape[2] // self._size) for each in made], dtype=np.int64)
        units = [self._units(each, rows, columns) for each, (rows, columns) in zip(made, grids.tolist(), strict=True)]
        return np.concatenate(units, dtype=np.float32), grids

    def blank(self, units: int) -> tuple[list[int], Ints]:
        """Return the tokens and the grid of one image of `units` units in a row."""
        grid = [[self._side, self._side * units]]
        return [self._processor.image_token_id] * units, np.array(grid, dtype=np.int64)

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


def _token_id(tokenizer: Any, token: str) -> int:
    if token not in tokenizer.get_vocab():
        raise ModelError(f"the tokenizer has no {token}; take the tokenizer that the model was saved with")
    return int(tokenizer.convert_tokens_to_ids(token))
