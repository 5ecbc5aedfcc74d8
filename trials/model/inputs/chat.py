"""Lengths of conversations for any model with a chat template: its tokenizer, and its processor if it takes images."""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers.processors import ByteLevel
from transformers import PretrainedConfig

from trials.arrays import Ints
from trials.data.kept.sealed import seal, unseal
from trials.data.records.sample import IMAGE, NO_VIDEOS, VIDEO, Clip, Lengths, Measured, Sample, Turn, kept_tokens
from trials.errors import DataError, ModelError, TrialsError
from trials.model.inputs.answers import PLACES, LearntAnswer, find_answers, keeps_places, stop_tokens
from trials.model.inputs.chat_template import REFUSALS, ChatTemplate, chatml, default_template
from trials.model.inputs.digest import model_digest
from trials.model.inputs.processor import ImageCount, Loader, count_images, load_processor, placeholder
from trials.model.inputs.videos import VideoCount, VideoInputs
from trials.model.refusals.refusal import refusing
from trials.model.skeleton import load_config

# A choice: some MB. Data sets repeat sizes, so most counts are found here.
_COUNTED = 1 << 16
"""Sizes of the images of a sample whose counts are kept."""
_TEXT_ALONE = "but the model takes text alone; take the record out, or train a model that takes"
"""Refusal of what a model without a vision side is shown, before the name of that."""


class VideoLoader(Protocol):
    """Loader of the video inputs of a family from a model folder."""

    def __call__(self, path: str, config: PretrainedConfig, processor: Any) -> VideoInputs:
        """Return the video inputs. Raise ModelError for a folder whose settings cannot be used."""


def measurer(
    model_path: str,
    trust_remote_code: bool = False,
    max_tokens: int | None = None,
    *,
    load: Loader = load_processor,
    videos: VideoLoader | None = None,
) -> "ChatMeasurer":
    """Return the measurer of a model folder, which cuts samples to `max_tokens`.

    `load` loads its processor, and `videos` makes its videos; without it they are refused. Raise ModelError where the
    folder's processor, tokenizer or chat template is not enough.
    """
    config = load_config(model_path, trust_remote_code=trust_remote_code)
    processor = load(model_path, config, trust_remote_code=trust_remote_code)
    again = functools.partial(measurer, model_path, trust_remote_code, max_tokens, load=load, videos=videos)
    with refusing(f"the processor of model {model_path} cannot be used", "save it there with save_pretrained"):
        of_text = f"the conversation shows a video, {_TEXT_ALONE} videos"
        filmed: VideoInputs | DataError | ModelError = DataError(NO_VIDEOS if processor.image_token else of_text)
        if videos:
            try:
                filmed = videos(model_path, config, processor)
            except ModelError as error:  # refuses data that need it, and no others
                filmed = _unprepared(f"{model_path}: {error}")
        settings = str(filmed) if isinstance(filmed, TrialsError) else dict(filmed.settings)
        digest = model_digest(ChatMeasurer, config, processor.tokenizer, processor, max_tokens, videos=settings)
        stops = stop_tokens(model_path, config, processor.tokenizer)
        return ChatMeasurer(processor, digest, max_tokens, again, filmed, stops=stops)


def _unprepared(why: str) -> ModelError:
    return ModelError(
        f"the data show videos, which this model folder cannot prepare: {why}; or take the records with videos out"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What one token stands for: an image, or a video at one time."""

    number: int
    """Number of the image among the sample's images, or of the video among its videos."""
    is_video: bool
    width: int
    """Tokens that it stands for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenised:
    """A conversation as tokens, of which one stands for all tokens of an image, or of a video at one time."""

    ids: Ints
    """[tokens]"""
    is_target: NDArray[np.bool_]
    """[tokens]"""
    is_image: NDArray[np.bool_]
    """[tokens]: those that stand for others, of a video too."""
    ends: Ints
    """[tokens]: length of the sample up to the end of each token, its images in full."""
    shown: tuple[Shown, ...]
    """What the tokens of `is_image` stand for, in order."""
    counts: tuple[ImageCount, ...]
    """Of each image."""
    videos: tuple[VideoCount, ...]
    """Of each video."""
    kept: int
    """Length of the sample after the cut."""
    unused: tuple[str, ...]
    """What the chat template leaves out of each answer that it does not write whole."""

    def expanded(self, values: NDArray[Any], of_images: Sequence[Sequence[int]]) -> NDArray[Any]:
        """Return a value for each token of the sample: `values` of the text, and `of_images` in each image's place."""
        parts = np.split(values, np.flatnonzero(self.is_image))
        inserted = [piece for image, part in zip(of_images, parts[1:], strict=True) for piece in (image, part[1:])]
        return np.concatenate([parts[0], *inserted]).astype(values.dtype)


class ChatMeasurer:
    """The lengths of what the processor makes of a conversation that the model's chat template has written.

    Targets are what an assistant's turn adds to the prompt that asks for it (`answers.py`).
    """

    def __init__(
        self,
        processor: Any,
        digest: str,
        max_tokens: int | None,
        again: Callable[[], "ChatMeasurer"],
        videos: VideoInputs | DataError | ModelError,
        *,
        stops: Set[int],
    ) -> None:
        """`again` makes another one, in another process: processors do not travel.

        `videos` is an error where none are taken; `stops` are the tokens at which an answer ends. Raise
        ModelError for a tokenizer without offsets or image token, and for a template that shows no image. Where the
        processor's image token is None, the model takes text alone.
        """
        self._again = again
        self.processor = processor
        """The model's own processor, without the part for videos."""
        self._tokenizer = processor.tokenizer
        self.max_tokens = max_tokens
        self.digest = digest
        # Processors check their settings for each image anew, which takes as long as its text.
        self._count = functools.lru_cache(_COUNTED)(functools.partial(count_images, processor))
        if not self._tokenizer.is_fast:
            raise ModelError("the tokenizer gives no offsets of its tokens; save its fast form (tokenizer.json)")
        _count_spaces(self._tokenizer)
        self._placeholders = {processor.image_token: placeholder(processor)} if processor.image_token else {}
        for token in self._placeholders:
            if self._tokenizer.encode(token, add_special_tokens=False) != [processor.image_token_id]:
                raise ModelError(
                    f"{token} is no token of its own; add it to the tokenizer as the model's processor does"
                )
        # Gemma 3 has one token in the place of an image, and others in the places of its features.
        names = self._tokenizer.convert_ids_to_tokens(processor.image_token_ids)
        self._image_tokens = tuple(dict.fromkeys((*self._placeholders, *names)))
        self._videos = videos
        # Where the model has such a token it takes features, so that no text may spell it.
        self._video_token: str | None = getattr(processor, "video_token", None)
        self.template = ChatTemplate(
            self._tokenizer,
            default_template(processor.chat_template, self._tokenizer.chat_template),
            image_tokens=tuple(self._placeholders),
            video=self._video_token,
        )
        self.no_end = self._missing_end(stops)
        self.other_prompt = self._other_prompt()
        written_here = bool(processor.image_token) and processor.chat_template == chatml(processor.image_token)
        self.no_template = "conversations are written as ChatML" if written_here else None
        if self.videos and not self.template.shows_videos():
            self._videos = _unprepared(
                f"the chat template does not show a video as {self._video_token} once; save the model's own template "
                "with its tokenizer or processor"
            )

    def __reduce__(self) -> tuple[Callable[[], "ChatMeasurer"], tuple[()]]:
        return self._again, ()

    @property
    def videos(self) -> VideoInputs | None:
        """What makes the model's videos; None where they are refused."""
        return None if isinstance(self._videos, TrialsError) else self._videos

    @property
    def takes_images(self) -> bool:
        return bool(self._placeholders)

    @property
    def no_videos(self) -> DataError | ModelError | None:
        # Raised for many records: each would add to its traceback.
        return self._videos.with_traceback(None) if isinstance(self._videos, TrialsError) else None

    @property
    def video_settings(self) -> Mapping[str, Any]:
        return self.videos.settings if self.videos else {}

    def measure(
        self, sample: Sample, image_sizes: tuple[tuple[int, int], ...], clips: tuple[Clip, ...] = ()
    ) -> Measured:
        text = self.tokens_of(sample, image_sizes, clips)
        lengths = Lengths(
            vision_units=sum(count.units for count in text.counts) + sum(video.units for video in text.videos),
            text_tokens=text.kept,
            target_tokens=int(np.count_nonzero(text.is_target & (text.ends <= text.kept))),
        )
        tokens = seal(self._source(sample, text.videos), text.ids, text.is_target)
        return Measured(lengths=lengths, unused=text.unused, tokens=tokens)

    def tokens_of(
        self,
        sample: Sample,
        image_sizes: tuple[tuple[int, int], ...],
        clips: tuple[Clip, ...] = (),
        kept: bytes = b"",
    ) -> "Tokenised":
        """Return the tokens of a conversation with images of these sizes. Raise DataError as `measure` does.

        `kept` is that of `Encoder.encode`.
        """
        if image_sizes and not self.takes_images:
            raise DataError(f"the conversation shows images, {_TEXT_ALONE} images")
        if sample.videos and (refusal := self.no_videos):
            raise refusal
        if sample.turns[0].role == "assistant":
            raise DataError("the conversation begins with an answer; begin it with a question, or remove that answer")
        counts = self._count(image_sizes, sample.image_options)
        videos = tuple(self.videos.count(clip) for clip in clips if self.videos)
        if kept and (found := unseal(kept, self._source(sample, videos))) is not None:
            return self._placed(*found, counts, videos)
        try:
            rendered = self.template.rendered(sample.turns, videos=bool(videos))
            self._check_spelled(rendered, sample)
            moves = bool(counts or videos) and not keeps_places(sample.turns, rendered, self._tokens(videos))
            text = self._filled(rendered, videos)
            answers = tuple(find_answers(sample.turns, text, functools.partial(self._written, videos=videos)))
        except REFUSALS as error:
            raise DataError(f"the model's chat template refuses the conversation: {error}") from error
        unused = (*(answer.unused for answer in answers if answer.unused), *([PLACES] if moves else []))
        return self._placed(*self._tokenised(text, answers), counts, videos, unused)

    def _missing_end(self, stops: Set[int]) -> str | None:
        """Return why a trained model would not end its answers, None where the template writes one of `stops`."""
        written = self._tokenizer.encode(self.template.answer_end(), add_special_tokens=False)
        if not stops.isdisjoint(written):
            return None
        # A configuration may name a token that the tokenizer does not have.
        named = " or ".join(filter(None, self._tokenizer.convert_ids_to_tokens(sorted(stops))))
        return f"the chat template does not end an answer with {named or 'a token'}, at which the model would stop"

    def _other_prompt(self) -> str | None:
        """Return how prompts for generation differ from the text before answers that are learnt, None if they agree."""
        if (found := self.template.other_prompt()) is None:
            return None
        between, prompt = found
        return (
            f"the chat template writes {between!r} between a question and its answer, but {prompt!r} behind a question "
            "that asks for one"
        )

    def _check_spelled(self, text: str, sample: Sample) -> None:
        """Raise DataError for a conversation that spells a token in whose place features are put."""
        expected = {token: (len(sample.images), "images") for token in self._placeholders}
        if self._video_token:
            expected[self._video_token] = len(sample.videos), "videos"
        for token in dict.fromkeys((*self._image_tokens, *expected)):
            number, what = expected.get(token, (0, "images"))
            if (shown := text.count(token)) != number:
                missing = f"name the {what} in the record, or " if token in (IMAGE, VIDEO) else ""
                raise DataError(
                    f"the conversation spells {token} {shown} times for {number} {what}; {missing}take it out of the "
                    "text"
                )

    def _tokenised(self, text: str, answers: tuple[LearntAnswer, ...]) -> tuple[Ints, NDArray[np.bool_]]:
        """Return (ids, whether each is a target), both [tokens]."""
        ids, offsets = self._encoded(text, answers)
        return ids, _targets(offsets, answers)

    def _encoded(self, text: str, answers: tuple[LearntAnswer, ...]) -> tuple[Ints, Ints]:
        """Return (ids [tokens], offsets [tokens, 2]). Some processors make a prompt and its answer two texts."""
        apart, adds = getattr(self.processor, "takes_suffix", False), self._adds_special_tokens(text)
        starts = [0, *(answer.start for answer in answers if apart)]
        made = [
            self._tokenizer(text[start:end], add_special_tokens=adds, return_offsets_mapping=True, verbose=False)
            for start, end in pairwise([*starts, len(text)])
        ]
        ids = [np.array(each["input_ids"], dtype=np.int64) for each in made]
        offsets = [np.array(each["offset_mapping"], dtype=np.int64).reshape(-1, 2) for each in made]
        moved = [each + start for each, start in zip(offsets, starts, strict=True)]
        return np.concatenate(ids), np.concatenate(moved)

    def _source(self, sample: Sample, videos: tuple[VideoCount, ...]) -> bytes:
        """Return all that ids and targets of a conversation depend on, in which each image has one token."""
        turns = [(turn.role, turn.text, turn.is_learnt) for turn in sample.turns]
        return json.dumps([self.digest, turns, len(sample.images), [video.text for video in videos]]).encode()

    def _placed(
        self,
        ids: Ints,
        is_target: NDArray[np.bool_],
        counts: tuple[ImageCount, ...],
        videos: tuple[VideoCount, ...],
        unused: tuple[str, ...] = (),
    ) -> "Tokenised":
        """Return the tokens, with the images and videos that some of them stand for."""
        marks = self._tokenizer.convert_tokens_to_ids(list(self._tokens(videos).values()))
        is_image = (ids[:, None] == np.array(marks, dtype=np.int64)).any(axis=1)
        shown = tuple(self._shown(ids[is_image], counts, videos))
        width = np.ones(len(ids), dtype=np.int64)
        width[is_image] = [each.width for each in shown]
        ends = np.cumsum(width)
        return Tokenised(
            ids=ids,
            is_target=is_target,
            is_image=is_image,
            ends=ends,
            shown=shown,
            counts=counts,
            videos=videos,
            kept=kept_tokens(int(width.sum()), int(ends[is_image].max(initial=0)), self.max_tokens),
            unused=unused,
        )

    def _tokens(self, videos: Sequence[VideoCount]) -> dict[str, str]:
        """Return the tokens that stand for images and videos, by the placeholders of records."""
        shown = {IMAGE: str(self.processor.image_token)} if self._placeholders else {}
        return {**shown, VIDEO: self._video_token} if videos and self._video_token else shown

    def _adds_special_tokens(self, text: str) -> bool:
        """Return whether the tokenizer adds tokens around a text, such as the one that begins every text.

        As in transformers' `apply_chat_template`: that of a tokenizer never does, and that of a processor does, unless
        the template has written that token.
        """
        first = self._tokenizer.bos_token
        return bool(self._placeholders) and not (first and text.startswith(first))

    def _shown(self, ids: Ints, counts: tuple[ImageCount, ...], videos: tuple[VideoCount, ...]) -> Iterator[Shown]:
        """Yield what each of the tokens `ids` stands for."""
        images = (Shown(number=number, is_video=False, width=each.tokens) for number, each in enumerate(counts))
        mark = self._video_token if videos else None
        if mark is None:
            return images
        layers = (
            Shown(number=number, is_video=True, width=each.width)
            for number, each in enumerate(videos)
            for _ in range(each.text.count(mark))
        )
        video = self._tokenizer.convert_tokens_to_ids(mark)
        return (next(layers if each == video else images) for each in ids.tolist())

    def _written(self, turns: tuple[Turn, ...], *, asks: bool = False, videos: tuple[VideoCount, ...]) -> str:
        """Return a conversation or its beginning as the processor expands it; `videos` belong to all of it."""
        return self._filled(self.template.rendered(turns, asks=asks, videos=bool(videos)), videos)

    def _filled(self, text: str, videos: tuple[VideoCount, ...]) -> str:
        """Return a text as the processor expands it, with one token for each image and layer of frames."""
        for token, spaced in self._placeholders.items():
            text = text.replace(token, spaced)
        if not videos or not self._video_token:
            return text
        first, *others = text.split(self._video_token)
        # The beginning of a conversation shows fewer.
        return first + "".join(f"{video.text}{other}" for video, other in zip(videos, others, strict=False))


def _targets(offsets: NDArray[np.int64], answers: tuple[LearntAnswer, ...]) -> NDArray[np.bool_]:
    """Return which tokens are targets, [tokens]: those with a character of an answer, as transformers marks them.

    Raise DataError for an answer without a token.
    """
    starts, ends = offsets.T
    is_target = np.zeros(len(offsets), dtype=np.bool_)
    for answer in answers:
        within = (starts < answer.said) & (ends > answer.start) | (starts >= answer.start) & (ends <= answer.end)
        within &= starts < ends
        if not within.any():
            raise DataError("an answer has no token in the text that the model's chat template writes; correct it")
        is_target |= within
    return is_target


def _count_spaces(tokenizer: Any) -> None:
    """Make a tokenizer count white space to the offsets of its tokens, so that it belongs to an answer."""
    backend = tokenizer.backend_tokenizer
    if backend.post_processor is not None:
        whole = ByteLevel()  # takes the state of any other kind
        whole.__setstate__(
            backend.post_processor.__getstate__().replace(b'"trim_offsets":true', b'"trim_offsets":false')
        )
        backend.post_processor = whole
