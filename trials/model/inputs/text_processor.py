"""The processor of a model that takes text alone: its tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig

from trials.arrays import Ints
from trials.data.records.sample import NO_GRIDS
from trials.model.inputs.preprocessing import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextProcessor:
    """What `ChatMeasurer` asks of a processor, without images."""

    tokenizer: Any
    chat_template: str | None = None
    """Chat template; None for the template of the tokenizer."""
    image_token: str | None = None
    image_token_id: int | None = None
    image_token_ids: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return no settings: the tokenizer is saved with its own."""
        return {}


def load_text_processor(path: str, config: PretrainedConfig, *, trust_remote_code: bool) -> TextProcessor:
    """Implement `Loader` (trials/model/inputs/processor.py)."""
    return TextProcessor(tokenizer=load_tokenizer(path, trust_remote_code=trust_remote_code))


class NoImages:
    """Implementation of `ImageInputs` (trials/model/inputs/chat_encoder.py) for models without a vision side."""

    unit_shape = (0,)

    def __init__(self, config: PretrainedConfig, processor: TextProcessor) -> None:
        """Ignore both: neither says anything of images."""

    def tokens(self, size: tuple[int, int], count: int) -> list[int]:
        """Return no token."""
        return []

    def pixels(
        self, images: Sequence[NDArray[np.uint8]], resized: Sequence[tuple[int, int] | None] = ()
    ) -> tuple[NDArray[np.float32], Ints]:
        """Return one unit without values for each image."""
        return np.zeros((len(images), *self.unit_shape), dtype=np.float32), NO_GRIDS

    def blank(self, units: int) -> tuple[list[int], Ints]:
        """Return no token and no grid."""
        return [], NO_GRIDS

    def pieces(self, units: int, grids: Ints) -> Ints:
        """Return a piece for each unit."""
        return np.ones(units, dtype=np.int64)
