"""What families share whose vision units are merged patches of images in their own resolution, as in Qwen2-VL.

A grid is (frames, height, width) in patches. The projector merges squares of `spatial_merge_size` x
`spatial_merge_size` patches into one token each; such a square is one vision unit.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PretrainedConfig

from trials.data.records.sample import Ints
from trials.errors import ModelError
from trials.model.family import Images

_LARGEST_PATCH = 1_024


class PatchInputs:
    """Implements `ImageInputs` (trials/model/inputs/chat_encoder.py) for processors that flatten patches."""

    def __init__(self, config: PretrainedConfig, processor: Any) -> None:
        """Raise ModelError for a processor whose patches are not those of the model."""
        self._merge = config.vision_config.spatial_merge_size
        self._processor = processor.image_processor
        self._image_token: int = config.image_token_id
        self.unit_shape = unit_shape(config)
        made = _sizes(self._processor, "merge_size")
        taken = _sizes(config.vision_config, "spatial_merge_size")
        if made != taken:
            raise ModelError(
                f"the image processor makes patches of (size, frames, merged) {made} but the model takes {taken}; "
                "correct preprocessor_config.json"
            )

    def tokens(self, size: tuple[int, int], count: int) -> list[int]:  # noqa: ARG002 (the Protocol has it)
        """Return one image token for each of `count` merged patches."""
        return [self._image_token] * count

    def pixels(self, images: Sequence[NDArray[np.uint8]]) -> tuple[NDArray[np.float32], Ints]:
        """Return (pixels [units, *unit_shape], grids [images, 3])."""
        made = self._processor(list(images), input_data_format="channels_last", return_tensors="np")
        pixels = np.asarray(made["pixel_values"], dtype=np.float32).reshape(-1, *self.unit_shape)
        return pixels, np.asarray(made["image_grid_thw"], dtype=np.int64)

    def blank(self, units: int) -> tuple[list[int], Ints]:
        """Return the tokens and the grid of one image of `units` merged patches in a row."""
        return [self._image_token] * units, np.array([[1, self._merge, self._merge * units]], dtype=np.int64)


def unit_shape(config: PretrainedConfig) -> tuple[int, int]:
    """(patches, channels x frames x height x width of a patch)"""
    vision = config.vision_config
    patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return vision.spatial_merge_size**2, patch


def _sizes(settings: Any, merge: str) -> tuple[int, int, int]:
    return settings.patch_size, settings.temporal_patch_size, getattr(settings, merge)


def check_patches(config: PretrainedConfig) -> None:
    """Raise ModelError for sizes of patches that make no sense, and for tokens outside the vocabulary."""
    vision = config.vision_config
    sizes = {name: getattr(vision, name) for name in ("patch_size", "temporal_patch_size", "spatial_merge_size")}
    for name, size in sizes.items():
        if not 1 <= size <= _LARGEST_PATCH:
            raise ModelError(f"{name} is {size}; correct it in the vision_config of config.json, to 1 at least")
    if vision.in_channels != 3:
        raise ModelError(f"in_channels is {vision.in_channels}, but images have 3; correct it in config.json")
    vocabulary = config.get_text_config().vocab_size
    for name in ("image_token_id", "vision_start_token_id", "vision_end_token_id"):
        if not 0 <= getattr(config, name) < vocabulary:
            raise ModelError(
                f"{name} is {getattr(config, name)} but the language model has {vocabulary} tokens; correct {name} or "
                "vocab_size in config.json"
            )


def random_images(config: PretrainedConfig, units: int) -> Images:
    """Return a square image with as many of the units as it can hold, and the rest in a row, between their marks."""
    merge, side = config.vision_config.spatial_merge_size, math.isqrt(units)
    shapes = [(side, side), (1, units - side**2)]
    grids = [(1, merge * height, merge * width) for height, width in shapes if width]
    ids: list[int] = []
    for _, height, width in grids:
        shown = [config.image_token_id] * (height * width // merge**2)
        ids += [config.vision_start_token_id, *shown, config.vision_end_token_id]
    return Images(
        pixels=torch.randn(units, *unit_shape(config)), grids=torch.tensor(grids), input_ids=torch.tensor(ids)
    )


def positions(config: PretrainedConfig, input_ids: Ints, grids: Ints) -> Ints:
    """Return positions [3, tokens] in time, height and width (M-RoPE, Qwen2-VL paper, section 2.1).

    Text counts all three on; an image's tokens count rows and columns from where the text stands, and the text behind
    it goes on from the largest of them.
    """
    merge = config.vision_config.spatial_merge_size
    images = np.flatnonzero(input_ids == config.image_token_id)
    pieces, done, start, shown = [np.zeros((3, 0), dtype=np.int64)], 0, 0, 0
    for frames, height, width in grids.tolist():
        if shown == len(images):  # the unit of a pack without images has no token
            break
        text = int(images[shown]) - done
        pieces.append(np.tile(np.arange(start, start + text), (3, 1)))
        start += text
        shape = frames, height // merge, width // merge
        pieces.append(np.indices(shape).reshape(3, -1) + start)
        start += max(shape[1:])
        shown += math.prod(shape)
        done += text + math.prod(shape)
    pieces.append(np.tile(np.arange(start, start + len(input_ids) - done), (3, 1)))
    return np.concatenate(pieces, axis=1)


def model_inputs(config: PretrainedConfig, input_ids: torch.Tensor, images: Images | None) -> dict[str, Any]:
    """Implement `Family.model_inputs` for models that take grids and where their images are."""
    inputs: dict[str, Any] = {"input_ids": input_ids[None]}
    if images:
        inputs |= {
            "pixel_values": images.pixels.flatten(0, 1),
            "image_grid_thw": images.grids,
            "mm_token_type_ids": (input_ids == config.image_token_id).long()[None],
        }
    return inputs


def shrink_tokens(settings: dict[str, Any], vocabulary: int) -> None:
    """Give the tokens around images ids of their own at the end of a small vocabulary, in place."""
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    settings.update({name: vocabulary - 1 - number for number, name in enumerate(names)})
