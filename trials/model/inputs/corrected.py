"""Processors of transformers whose own counts are not those of the images that they process."""

from collections.abc import Sequence
from typing import Any

from transformers import Gemma3Processor, Idefics3Processor
from transformers.processing_utils import MultiModalData

from trials.model.inputs.split_images import split_images


class Gemma3(Gemma3Processor):
    """Processor that counts the tokens before and behind an image, too."""

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, **_: Any) -> MultiModalData:
        images = len(image_sizes)
        return MultiModalData(num_image_tokens=[self.image_seq_length + 2] * images, num_image_patches=[1] * images)


class Idefics3(Idefics3Processor):
    """Processor with the tiles and tokens an image really gets: the original rounds sides that are rounded again."""

    def _get_num_multimodal_tokens(self, image_sizes: Any = None, **_: Any) -> MultiModalData:
        sizes: Sequence[tuple[int, int]] = [tuple(size) for size in image_sizes]
        images = split_images(self)
        return MultiModalData(
            num_image_tokens=[len(images.tokens(size, self.image_seq_len)) for size in sizes],
            num_image_patches=[images.units(size) for size in sizes],
        )


# SmolVLM's own processor differs in videos alone, cannot count, and needs a package that spells numbers in words.
CORRECTED = {"gemma3": Gemma3, "idefics3": Idefics3, "smolvlm": Idefics3}
"""By model type."""
