"""Samples as a model's own chat template, tokenizer and processor make them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from transformers import PretrainedConfig

from trials.arrays import Ints
from trials.data.records.images import image_header, image_pixels
from trials.data.records.sample import IGNORED, NO_GRIDS, Clip, Encoded, Lengths, Measured, Sample
from trials.data.records.videos import clip_of
from trials.errors import DataError, ModelError
from trials.model.inputs.chat import ChatMeasurer, Shown, Tokenised, VideoLoader, measurer
from trials.model.inputs.preprocessing import check_vocabulary, preparing
from trials.model.inputs.processor import Loader, count_images, load_processor
from trials.model.refusals.refusal import refusing
from trials.model.skeleton import load_config

Positions: TypeAlias = Callable[[PretrainedConfig, Ints, Ints, Sequence[float] | None], Ints]
"""`Family.positions`"""
_PROBES = (((5, 7),), ((90, 41), (5, 7)))
"""Sizes (height, width) of the images of two samples with which processors are tried: none is a multiple of a tile."""


class ImageInputs(Protocol):
    """A family's images: what stands for them in the text, and what the vision tower takes."""

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """Shape of one vision unit."""

    def tokens(self, size: tuple[int, int], count: int) -> list[int]:
        """Return the `count` tokens that stand for an image of (height, width) in a sample."""

    def pixels(
        self, images: Sequence[NDArray[np.uint8]], resized: Sequence[tuple[int, int] | None] = ()
    ) -> tuple[NDArray[np.float32], Ints]:
        """Return (pixels [units, *unit_shape], grids [images, G]) of one sample's images [height, width, 3].

        `resized` has the `ImageCount.resized` of each, or is empty where no image has one.
        """

    def blank(self, units: int) -> tuple[list[int], Ints]:
        """Return (tokens, grids) of images with `units` units in all, whose pixels are zeros."""

    def pieces(self, units: int, grids: Ints) -> Ints:
        """Implement `Encoder.pieces`."""


def chat_encoder(
    model_path: str,
    trust_remote_code: bool = False,
    max_tokens: int | None = None,
    *,
    inputs: Callable[[PretrainedConfig, Any], ImageInputs],
    positions: Positions,
    load: Loader = load_processor,
    videos: VideoLoader | None = None,
    kind: "type[ChatEncoder] | None" = None,
) -> "ChatEncoder":
    """Implement `Family.encoder`, with an encoder of a `kind` if any.

    `inputs` gets the model's configuration and its processor. Without `videos`, samples with videos are refused.

    Raise ModelError where the folder's processor, tokenizer or chat template is not enough.
    """
    config = load_config(model_path, trust_remote_code=trust_remote_code)
    measuring = measurer(model_path, trust_remote_code, max_tokens, load=load, videos=videos)
    processor = measuring.processor
    with preparing(getattr(processor, "image_processor", None)):
        prepared = inputs(config, processor)
        if processor.image_token:
            _check_images(processor, prepared)
    with refusing(f"the processor of model {model_path} cannot be used", "save it there with save_pretrained"):
        return (kind or ChatEncoder)(config, measuring, prepared, positions)


def _check_images(processor: Any, inputs: ImageInputs) -> None:
    """Raise ModelError where a processor does not make of images what it counts of their sizes."""
    for sizes in _PROBES:
        black = [np.zeros((*size, 3), dtype=np.uint8) for size in sizes]
        counts = count_images(processor, sizes)
        units, _ = inputs.pixels(black)
        counted, made = sum(count.units for count in counts), len(units)
        if counted != made or units.shape[1:] != inputs.unit_shape or not np.isfinite(units).all():
            raise ModelError(
                f"images of (height, width) {', '.join(map(str, sizes))} have {counted} vision units of "
                f"{inputs.unit_shape} numbers by their sizes, but {made} of {units.shape[1:]}, or some that are not "
                "finite, by their pixels; correct preprocessor_config.json"
            )
        # With a wrong rescaling all images may look the same, which no other check shows.
        if np.array_equal(units, inputs.pixels([picture + np.uint8(255) for picture in black])[0]):
            raise ModelError("the image processor makes the same of black and white; correct preprocessor_config.json")
        for size, count in zip(sizes, counts, strict=True):
            if len(inputs.tokens(size, count.tokens)) != count.tokens:
                raise ModelError(
                    f"an image of (height, width) {size} is counted as {count.tokens} tokens, but shown as "
                    f"{len(inputs.tokens(size, count.tokens))}; correct preprocessor_config.json"
                )


class ChatEncoder:
    """Conversations as the model's chat template writes them, with the tokens and pixels of their images."""

    def __init__(
        self, config: PretrainedConfig, measuring: ChatMeasurer, inputs: ImageInputs, positions: Positions
    ) -> None:
        """Raise ModelError where the tokenizer and the configuration disagree."""
        self._config = config
        self.measurer = measuring
        self._inputs = inputs
        self._positions = positions
        processor, tokenizer = measuring.processor, measuring.processor.tokenizer
        shown = processor.image_token_ids
        if shown and config.image_token_id not in shown:
            raise ModelError(
                f"the tokenizer's image token is {', '.join(map(str, shown))}, the model's is {config.image_token_id}; "
                "correct the image token's id in config.json, or take the tokenizer that the model was saved with"
            )
        check_vocabulary(config, tokenizer)
        # Pad tokens have no label, so any token will do where the tokenizer has none for padding.
        ids = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad_token_id = next(int(each) for each in ids if each is not None)

    @property
    def digest(self) -> str:
        return self.measurer.digest

    @property
    def max_tokens(self) -> int | None:
        return self.measurer.max_tokens

    @property
    def unit_shape(self) -> tuple[int, ...]:
        return self._inputs.unit_shape

    @property
    def takes_images(self) -> bool:
        return self.measurer.takes_images

    @property
    def no_videos(self) -> DataError | ModelError | None:
        return self.measurer.no_videos

    @property
    def video_settings(self) -> Mapping[str, Any]:
        return self.measurer.video_settings

    @property
    def no_end(self) -> str | None:
        return self.measurer.no_end

    @property
    def other_prompt(self) -> str | None:
        return self.measurer.other_prompt

    @property
    def no_template(self) -> str | None:
        return self.measurer.no_template

    def measure(
        self, sample: Sample, image_sizes: tuple[tuple[int, int], ...], clips: tuple[Clip, ...] = ()
    ) -> Measured:
        return self.measurer.measure(sample, image_sizes, clips)

    def encode(self, sample: Sample, *, pixels: bool, kept: bytes = b"") -> Encoded:
        # Opened once: where files are far away, each opening takes as long as decoding.
        pictures = [image_pixels(image) for image in sample.images]
        sizes = tuple(picture.shape[:2] for picture in pictures)
        clips = tuple(clip_of(video, image_header) for video in sample.videos if not self.no_videos)
        text = self.measurer.tokens_of(sample, sizes, clips, kept)
        shown = [self._tokens(each, sizes) for each in text.shown]
        input_ids = text.expanded(text.ids, shown)[: text.kept]
        is_target = text.expanded(text.is_target, [[False] * len(each) for each in shown])[: text.kept]
        units, grids, seconds = None, NO_GRIDS, None
        if sample.videos:
            units, grids, seconds = self._with_videos(sample, pictures, clips, text)
        elif pixels and pictures:
            units, grids = self._pixels(pictures, text)
        return Encoded(
            input_ids=input_ids,
            labels=np.where(is_target, input_ids, IGNORED),
            positions=self._placed(input_ids, grids, seconds, pixels=pixels),
            pixel_values=units if pixels else None,
            grids=grids if pixels else NO_GRIDS,
        )

    def _tokens(self, shown: Shown, sizes: Sequence[tuple[int, int]]) -> list[int]:
        if shown.is_video:
            assert self.measurer.videos is not None
            return [self.measurer.videos.token] * shown.width
        return self._inputs.tokens(sizes[shown.number], shown.width)

    def _pixels(self, pictures: Sequence[NDArray[np.uint8]], text: Tokenised) -> tuple[NDArray[np.float32], Ints]:
        return self._inputs.pixels(pictures, [count.resized for count in text.counts])

    def _with_videos(
        self, sample: Sample, pictures: Sequence[NDArray[np.uint8]], clips: Sequence[Clip], text: Tokenised
    ) -> tuple[NDArray[np.float32], Ints, list[float]]:
        """Return (pixels, grids, seconds) of images and videos, in the order of their tokens."""
        assert self.measurer.videos is not None
        prepared = [self.measurer.videos.prepared(*each) for each in zip(clips, sample.videos, strict=True)]
        pieces, rows = list[NDArray[np.float32]](), NO_GRIDS
        if pictures:
            pixels, rows = self._pixels(pictures, text)
            pieces = np.split(pixels, np.cumsum([count.units for count in text.counts[:-1]]))
        units, grids, seconds = list[NDArray[np.float32]](), list[Ints](), list[float]()
        # A video has a mark for each of its times, but its pixels come once.
        for number, is_video in dict.fromkeys((each.number, each.is_video) for each in text.shown):
            video = prepared[number] if is_video else None
            units.append(video.pixels if video else pieces[number])
            grids.append(video.grid if video else rows[number : number + 1])
            seconds.append(video.seconds if video else 0.0)
        return np.concatenate(units), np.concatenate(grids), seconds

    def blank(self, lengths: Lengths, *, pixels: bool) -> Encoded:
        shown, grids = self._inputs.blank(lengths.vision_units) if lengths.vision_units else ([], NO_GRIDS)
        shown = shown[: lengths.text_tokens]
        padding = [self.pad_token_id] * (lengths.text_tokens - len(shown))
        input_ids = np.array([*shown, *padding], dtype=np.int64)
        has_pixels = pixels and lengths.vision_units > 0
        shape = (lengths.vision_units, *self.unit_shape)
        return Encoded(
            input_ids=input_ids,
            labels=np.full_like(input_ids, IGNORED),
            positions=self._placed(input_ids, grids, None, pixels=pixels),
            pixel_values=np.zeros(shape, dtype=np.float32) if has_pixels else None,
            grids=grids if has_pixels else NO_GRIDS,
        )

    def pieces(self, units: int, grids: Ints) -> Ints:
        return self._inputs.pieces(units, grids)

    def _placed(self, input_ids: Ints, grids: Ints, seconds: Sequence[float] | None, *, pixels: bool) -> Ints:
        # Grids come with the pixels; the stage of the labels needs no positions.
        if not pixels:
            return np.arange(len(input_ids))[None]
        return self._positions(self._config, input_ids, grids, seconds)
