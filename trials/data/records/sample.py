"""Samples of a dataset: conversations, their lengths, and their encoding for one model."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trials.arrays import Ints
from trials.data.records.file_chunk import Place, where
from trials.errors import DataError, ModelError

NO_GRIDS: Ints = np.zeros((0, 0), dtype=np.int64)
"""Grids of images where a family has none, [0, 0]."""
Role: TypeAlias = Literal["system", "user", "assistant"]
Image: TypeAlias = Path | bytes
"""A file, or the content of one."""

IMAGE = "<image>"
"""Placeholder of an image in a user turn."""
VIDEO = "<video>"
"""Placeholder of a video in a user turn of a sample that has videos; plain text in any other sample."""
NO_VIDEOS = (
    "the conversation shows a video, which is not supported for this model; give the frames as a list of images, each "
    "with an <image>, or take the record out"
)
"""Refusal of samples with videos by a model that takes images."""
NO_OPTIONS = (
    "an image has min_pixels, max_pixels, resized_height or resized_width of its own, but the model's processor "
    "prepares all images by one rule; remove them, and resize the image itself where it is too large"
)
"""Refusal of samples whose images have options."""
IGNORED = -100
"""Label of a token that is no target, as in PyTorch's cross-entropy."""


class Kind(IntFlag):
    """What a sample has: a model's template or processor may treat each of them otherwise."""

    SYSTEM = 1
    LATER_ANSWERS = 2
    IMAGE = 4
    LATER_IMAGES = 8
    VIDEO = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """The size to which a record wants one image to be prepared: bounds on its pixels, or its height and width."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    """Both in pixels, or neither; rounded to what the model takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """A video as a record names it."""

    source: Path | tuple[Image, ...]
    """A video file, a folder of frames, or the frames in order."""
    fps: float | None = None
    """Frames per second: of the frames, or to be taken from a file. None where the record does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """What is known of a video without decoding it."""

    frames: int
    size: tuple[int, int]
    """(height, width) of each frame in pixels."""
    is_file: bool
    """Whether frames are chosen from a file. Frames that are given as images are all used."""
    fps: float | None = None
    """Frames per second; None where frames are given without."""
    wanted_fps: float | None = None
    """Frames per second that the record wants from a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message; a user's text holds an `<image>` for each image that it shows, and a `<video>` for each video."""

    role: Role
    text: str
    is_learnt: bool = True
    """Whether the loss counts it, if it is an answer; no other turn counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One conversation. Readers guarantee as many `<image>` in the user turns as images, and `<video>` as videos."""

    turns: tuple[Turn, ...]
    images: tuple[Image, ...]
    image_sizes: tuple[tuple[int, int] | None, ...]
    """(height, width) in pixels as the record states it, one entry per image; None where it does not."""
    videos: tuple[Video, ...] = ()
    unused: tuple[str, ...] = ()
    """What the record holds and this sample does not, such as a key that no format knows; one text for each kind."""
    image_options: tuple[ImageOptions | None, ...] = ()
    """One entry per image, None for one without options; empty where no image has any."""

    @property
    def kind(self) -> Kind:
        """What it has."""
        roles = [turn.role for turn in self.turns]
        has = {
            Kind.SYSTEM: "system" in roles,
            Kind.LATER_ANSWERS: roles.count("assistant") > 1,
            Kind.IMAGE: bool(self.images),
            Kind.LATER_IMAGES: len(self.images) > 1,
            Kind.VIDEO: bool(self.videos),
        }
        return Kind(sum(part for part, is_there in has.items() if is_there))


@dataclass(frozen=True, slots=True, kw_only=True)
class BadLine:
    """A line that cannot be trained on, and why."""

    path: Path
    place: Place
    reason: str
    shows_media: bool = False
    """Whether it shows images or videos, where the line itself could be read."""

    def __str__(self) -> str:
        return f"{where(self.path, self.place)}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Sizes of a sample, from which its cost follows."""

    vision_units: int
    text_tokens: int
    """Positions in the language model, image tokens included."""
    target_tokens: int
    """Tokens that the loss counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Lengths of a record, and what it says besides."""

    lengths: Lengths
    unused: tuple[str, ...] = ()
    """What the record says that the model is not trained on; one text for each kind, as in `Sample.unused`."""
    tokens: bytes = b""
    """Its tokens, sealed (`trials.data.kept.sealed`); empty where they are not known."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """A sample as the model takes it."""

    input_ids: Ints
    """[tokens]"""
    labels: Ints
    """[tokens], not shifted: the token itself where it is a target, else -100."""
    positions: Ints
    """[P, tokens] (see `PackTokens`)"""
    pixel_values: NDArray[np.float32] | None
    """[units, *unit_shape]; None for a sample without images, and where pixels were not asked for."""
    grids: Ints
    """[images, G] (see `PackTokens`); empty where there are no pixels."""


class Measurer(Protocol):
    """Measurer of samples for one model. Processes that measure get their copy by pickling it."""

    @property
    def digest(self) -> str:
        """Digest of everything that a length depends on besides the sample: model, libraries, and `max_tokens`."""

    @property
    def max_tokens(self) -> int | None:
        """Number of tokens that longer samples are cut to; None leaves them whole."""

    @property
    def takes_images(self) -> bool:
        """Whether the model has a vision side; one without it takes text alone."""

    @property
    def no_videos(self) -> DataError | ModelError | None:
        """Why samples with videos are refused, None where they are taken: DataError by what the model is.

        ModelError stands for a fault of the model folder, which ends the reading of data that show videos.
        """

    @property
    def video_settings(self) -> Mapping[str, Any]:
        """How the model's own video processor is set, with its defaults; empty where videos are refused."""

    def measure(
        self, sample: Sample, image_sizes: tuple[tuple[int, int], ...], clips: tuple[Clip, ...] = ()
    ) -> Measured:
        """Measure a sample by its text, its images' (height, width) and its videos, without opening a file.

        Raise DataError for a sample that this model cannot take, or whose images `max_tokens` would cut.
        """


class Encoder(Measurer, Protocol):
    """Encoder of samples as one model's tokens and pixels. `measure` and `encode` agree on every length."""

    @property
    def pad_token_id(self) -> int:
        """Token that fills a padded micro-batch; never a target."""

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """Shape of one vision unit: (3, height, width) for a tile, (0,) where the model takes text alone."""

    @property
    def no_end(self) -> str | None:
        """Why a trained model would not end its answers; None where each has an end among its targets."""

    @property
    def other_prompt(self) -> str | None:
        """How prompts for generation differ from the text before the answers that are learnt; None if they agree."""

    @property
    def no_template(self) -> str | None:
        """What takes the place of a chat template that the model folder does not have; None where it has one."""

    def encode(self, sample: Sample, *, pixels: bool, kept: bytes = b"") -> Encoded:
        """Return the sample's tokens and labels, and its pixels with their positions when `pixels`.

        `kept` are the `tokens` that `measure` returned, whole; they are used if they were made of this sample.

        Raise DataError like `measure`, and for an image or a video that cannot be decoded, also without `pixels`: the
        stage with the labels has to know of the same faults as the stage with the pixels.
        """

    def blank(self, lengths: Lengths, *, pixels: bool) -> Encoded:
        """Return a sample of these lengths without a target: image tokens with zero pixels, then pad tokens."""

    def pieces(self, units: int, grids: Ints) -> Ints:
        """Return the sizes, in vision units, of the pieces in which ranks can share some images.

        Nothing of a piece is computed from another. Pieces are the images and videos of `grids` [images, G], or tiles
        where `grids` is empty.
        """


def kept_tokens(tokens: int, images_end: int, max_tokens: int | None) -> int:
    """Return how many of a sample's tokens are kept; `images_end` counts those up to the end of its last image.

    Raise DataError when an image would be cut, or be left out.
    """
    if max_tokens is None or tokens <= max_tokens:
        return tokens
    if images_end > max_tokens:
        raise DataError(
            f"its images end at token {images_end} of {tokens}, behind the {max_tokens} that a sample is cut to; raise "
            "data.max_tokens, or show fewer or smaller images"
        )
    return max_tokens
