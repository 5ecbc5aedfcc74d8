"""What a dataset is made of: conversations, their lengths, and their encoding for one model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trials.errors import DataError

Ints: TypeAlias = NDArray[np.int64]
Image: TypeAlias = Path | bytes
"""A file, or the content of one."""

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
    images: tuple[Image, ...]
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


class Measurer(Protocol):
    """Tells how long a sample is for one model. Processes that measure get their copy by pickling it."""

    @property
    def digest(self) -> str:
        """Of everything that a length depends on besides the sample: model, libraries, and `max_tokens`."""

    @property
    def max_tokens(self) -> int | None:
        """Longer samples are cut to so many tokens; None leaves them whole."""

    def measure(self, sample: Sample, image_sizes: tuple[tuple[int, int], ...]) -> Lengths:
        """The sample's lengths from its text and its images' (height, width), with no image opened.

        Raises DataError for a sample that this model cannot take, or whose images `max_tokens` would cut.
        """


class Encoder(Measurer, Protocol):
    """Turns samples into one model's tokens and pixels. `measure` and `encode` agree on every length."""

    @property
    def pad_token_id(self) -> int:
        """Fills a padded micro-batch; never a target."""

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """Shape of one vision unit: (3, height, width) for a tile."""

    def encode(self, sample: Sample, *, pixels: bool) -> Encoded:
        """The sample's tokens, and its pixels when `pixels`.

        Raises DataError like `measure`, and for an image that cannot be read.
        """

    def blank(self, lengths: Lengths, *, pixels: bool) -> Encoded:
        """A sample of these lengths that teaches nothing: image tokens for zero pixels, pad tokens, no target."""


def kept_tokens(tokens: int, images_end: int, max_tokens: int | None) -> int:
    """How many of a sample's tokens are kept; `images_end` counts those up to the end of its last image.

    Raises DataError when an image would be cut, or be left out.
    """
    if max_tokens is None or tokens <= max_tokens:
        return tokens
    if images_end > max_tokens:
        raise DataError(
            f"its images end at token {images_end} of {tokens}, behind the {max_tokens} that a sample is cut to; raise "
            "data.max_tokens, or show fewer or smaller images"
        )
    return max_tokens
