"""What a dataset is made of: conversations, their lengths, and their encoding for one model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]

IMAGE = "<image>"
"""Stands in a user turn where an image is shown."""
IGNORED = -100
"""Label of a token that is no target, as in PyTorch's cross-entropy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one side says; a user's text holds one `<image>` for each image that it shows."""

    role: Literal["system", "user", "assistant"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One conversation. Readers guarantee as many `<image>` in the user turns as images."""

    turns: tuple[Turn, ...]
    images: tuple[Path, ...]
    image_sizes: tuple[tuple[int, int] | None, ...]
    """(height, width) in pixels as the record states it, one entry per image; None where it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that cannot be trained on, and why."""

    path: Path
    line: int
    """Counted from 1."""
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How much work a sample is."""

    vision_units: int
    text_tokens: int
    """Positions in the language model, image tokens included."""
    target_tokens: int
    """Tokens that the loss counts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """A sample as the model takes it."""

    input_ids: Ints
    """[tokens]"""
    labels: Ints
    """[tokens], not shifted: the token itself where it is a target, else -100."""
    pixel_values: NDArray[np.float32] | None
    """[units, *unit_shape]; None for a sample without images, and where pixels were not asked for."""


class Encoder(Protocol):
    """Turns samples into one model's tokens and pixels. `measure` and `encode` agree on every length."""

    @property
    def pad_token_id(self) -> int:
        """Fills a padded micro-batch; never a target."""

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """Shape of one vision unit: (3, height, width) for a tile."""

    def measure(self, sample: Sample, image_sizes: tuple[tuple[int, int], ...]) -> Lengths:
        """The sample's lengths from its text and its images' (height, width), with no image opened."""

    def encode(self, sample: Sample, *, pixels: bool) -> Encoded:
        """The sample's tokens, and its pixels when `pixels`. Raises DataError for an image that cannot be read."""
