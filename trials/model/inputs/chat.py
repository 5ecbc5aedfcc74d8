"""Lengths of conversations for any model with a chat template: its tokenizer, and its processor if it takes images."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from trials.data.records.sample import IMAGE, Ints, Lengths, Sample, Turn, kept_tokens
from trials.errors import DataError, ModelError
from trials.model.inputs.digest import model_digest
from trials.model.inputs.processor import ImageCount, Loader, count_images, load_processor, placeholder
from trials.model.refusals.refusal import refusing
from trials.model.skeleton import load_config

_REFUSALS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""Exceptions of a template for a conversation that it does not support."""
_PROBE = "Hello", "World"


def measurer(
    model_path: str,
    trust_remote_code: bool = False,
    max_tokens: int | None = None,
    *,
    load: Loader = load_processor,
) -> "ChatMeasurer":
    """Return the measurer of a model folder, which cuts samples to `max_tokens`.

    `load` loads its processor. Raise ModelError where the folder's processor, tokenizer or chat template is not enough.
    """
    config = load_config(model_path, trust_remote_code=trust_remote_code)
    processor = load(model_path, config, trust_remote_code=trust_remote_code)
    again = functools.partial(measurer, model_path, trust_remote_code, max_tokens, load=load)
    with refusing(f"the processor of model {model_path} cannot be used", "save it there with save_pretrained"):
        digest = model_digest(ChatMeasurer, config, processor.tokenizer, processor, max_tokens)
        return ChatMeasurer(processor, digest, max_tokens, again)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tokenised:
    """A conversation as tokens, in which each image is one token that stands for several."""

    ids: Ints
    """[tokens]"""
    is_target: NDArray[np.bool_]
    """[tokens]"""
    is_image: NDArray[np.bool_]
    """[tokens]"""
    ends: Ints
    """[tokens]: length of the sample up to the end of each token, its images in full."""
    counts: tuple[ImageCount, ...]
    """Of each image."""
    kept: int
    """Length of the sample after the cut."""

    def expanded(self, values: NDArray[Any], of_images: Sequence[Sequence[int]]) -> NDArray[Any]:
        """Return a value for each token of the sample: `values` of the text, and `of_images` in each image's place."""
        parts = np.split(values, np.flatnonzero(self.is_image))
        inserted = [piece for image, part in zip(of_images, parts[1:], strict=True) for piece in (image, part[1:])]
        return np.concatenate([parts[0], *inserted]).astype(values.dtype)


class ChatMeasurer:
    """The lengths of what the processor makes of a conversation that the model's chat template has written.

    Targets are what an assistant's turn adds to the prompt that asks for it.
    """

    def __init__(
        self, processor: Any, digest: str, max_tokens: int | None, again: Callable[[], "ChatMeasurer"]
    ) -> None:
        """`again` makes another one, in another process: processors do not travel.

        Raise ModelError for a tokenizer without offsets or image token, and for a template that shows no image. Where
        the processor's image token is None, the model takes text alone.
        """
        self._again = again
        self._processor = processor
        self._tokenizer = processor.tokenizer
        self._template = processor.chat_template or self._tokenizer.chat_template
        self._max_tokens = max_tokens
        self._digest = digest
        if not self._tokenizer.is_fast:
            raise ModelError("the tokenizer gives no offsets of its tokens; save its fast form (tokenizer.json)")
        self._placeholders = {processor.image_token: placeholder(processor)} if processor.image_token else {}
        for token in self._placeholders:
            if self._tokenizer.encode(token, add_special_tokens=False) != [processor.image_token_id]:
                raise ModelError(
                    f"{token} is no token of its own; add it to the tokenizer as the model's processor does"
                )
        # Gemma 3 has one token in the place of an image, and others in the places of its features.
        names = self._tokenizer.convert_ids_to_tokens(processor.image_token_ids)
        self._image_tokens = tuple(dict.fromkeys((*self._placeholders, *names)))
        self._in_parts = self._takes_parts()

    def __reduce__(self) -> tuple[Callable[[], "ChatMeasurer"], tuple[()]]:
        return self._again, ()

    @property
    def digest(self) -> str:
        return self._digest

    @property
    def processor(self) -> Any:
        """The model's own processor, without the part for videos."""
        return self._processor

    @property
    def max_tokens(self) -> int | None:
        return self._max_tokens

    def measure(self, sample: Sample, image_sizes: tuple[tuple[int, int], ...]) -> Lengths:
        text = self.tokens_of(sample, image_sizes)
        return Lengths(
            vision_units=sum(count.units for count in text.counts),
            text_tokens=text.kept,
            target_tokens=int(np.count_nonzero(text.is_target & (text.ends <= text.kept))),
        )

    def tokens_of(self, sample: Sample, image_sizes: tuple[tuple[int, int], ...]) -> "Tokenised":
        """Return the tokens of a conversation with images of these sizes. Raise DataError as `measure` does."""
        if image_sizes and not self._placeholders:
            raise DataError(
                "the conversation shows images, but the model takes text alone; take the record out, or train a model "
                "that takes images"
            )
        counts = count_images(self._processor, image_sizes)
        try:
            text = self._spaced(sample.turns)
            targets = list(self._target_spans(sample.turns, text))
        except _REFUSALS as error:
            raise DataError(f"the model's chat template refuses the conversation: {error}") from error
        for token in self._image_tokens:
            expected = len(counts) if token in self._placeholders else 0
            if (shown := text.count(token)) != expected:
                raise DataError(
                    f"the conversation spells {token} {shown} times for {expected} images; take it out of the text"
                )
        return self._tokenised(text, targets, counts)

    def _tokenised(self, text: str, targets: list[tuple[int, int]], counts: tuple[ImageCount, ...]) -> "Tokenised":
        first = self._tokenizer.bos_token
        tokens = self._tokenizer(
            # A template may have written the token that begins every text, which the tokenizer would add again.
            text,
            add_special_tokens=not (first and text.startswith(first)),
            return_offsets_mapping=True,
            verbose=False,
        )
        ids = np.array(tokens["input_ids"], dtype=np.int64)
        is_image = np.isin(ids, self._tokenizer.convert_tokens_to_ids(list(self._placeholders)))
        width = np.ones(len(ids), dtype=np.int64)
        width[is_image] = [count.tokens for count in counts]
        ends = np.cumsum(width)
        return Tokenised(
            ids=ids,
            is_target=_within(np.array(tokens["offset_mapping"]), targets),
            is_image=is_image,
            ends=ends,
            counts=counts,
            kept=kept_tokens(int(width.sum()), int(ends[is_image].max(initial=0)), self._max_tokens),
        )

    def _target_spans(self, turns: tuple[Turn, ...], text: str) -> Iterator[tuple[int, int]]:
        """Yield the (start, end) of the assistant's turns in the whole text."""
        for number, turn in enumerate(turns):
            if turn.role == "assistant":
                prompt = self._spaced(turns[:number], asks=True)
                answered = text if number + 1 == len(turns) else self._spaced(turns[: number + 1])
                # A template may write an earlier turn otherwise than it did while that turn was the last.
                yield _common(prompt, text), _common(answered, text)

    def rendered(self, turns: tuple[Turn, ...], *, asks: bool = False, in_parts: bool | None = None) -> str:
        """Return the conversation as the chat template writes it; `asks` adds what begins the assistant's answer."""
        in_parts = self._in_parts if in_parts is None else in_parts
        messages = [{"role": turn.role, "content": self._content(turn, in_parts)} for turn in turns]
        text: str = self._tokenizer.apply_chat_template(
            messages, chat_template=self._template, tokenize=False, add_generation_prompt=asks
        )
        return text

    def _spaced(self, turns: tuple[Turn, ...], *, asks: bool = False) -> str:
        """Return the conversation with the white space that the processor adds around images."""
        text = self.rendered(turns, asks=asks)
        for token, spaced in self._placeholders.items():
            text = text.replace(token, spaced)
        return text

    def _content(self, turn: Turn, in_parts: bool) -> str | list[dict[str, str]]:
        if in_parts:
            return list(_parts(turn))
        text = turn.text
        for token in self._placeholders if turn.role == "user" else ():
            text = text.replace(IMAGE, token)
        return text

    def _takes_parts(self) -> bool:
        """Return whether the template wants contents as lists of parts, as most for images do, or as texts."""
        question, answer = _PROBE
        asked = Turn(role="user", text=IMAGE * len(self._placeholders) + question)
        turns = asked, Turn(role="assistant", text=answer)
        # A template for text alone may print a list of parts, as Python writes it.
        for in_parts in (True, False) if self._placeholders else (False,):
            try:
                text = self.rendered(turns, in_parts=in_parts)
            except _REFUSALS:
                continue
            if all(text.count(each) == 1 for each in (*self._placeholders, *_PROBE)):
                return in_parts
        shown = "".join(f"an image as {token} once, with " for token in self._placeholders)
        raise ModelError(
            f"the chat template is missing or does not show {shown}the text of each turn once; save the model's own "
            "template with its tokenizer or processor"
        )


def _parts(turn: Turn) -> Iterator[dict[str, str]]:
    texts = turn.text.split(IMAGE) if turn.role == "user" else [turn.text]
    yield from ({"type": "text", "text": text} for text in islice(texts, 1) if text or len(texts) == 1)
    for text in texts[1:]:
        yield {"type": "image"}
        if text:
            yield {"type": "text", "text": text}


def _common(prefix: str, text: str) -> int:
    """Return the length of the common beginning of two texts."""
    if text.startswith(prefix):
        return len(prefix)
    return next(number for number, pair in enumerate(zip_longest(prefix, text)) if pair[0] != pair[1])


def _within(offsets: NDArray[np.int64], spans: list[tuple[int, int]]) -> NDArray[np.bool_]:
    """Return which tokens lie in a span, [tokens], from the (start, end) of each; an empty token lies in none."""
    starts, ends = offsets.reshape(-1, 2).T
    within = np.zeros(len(offsets), dtype=np.bool_)
    for start, end in spans:
        within |= (starts >= start) & (ends <= end) & (ends > starts)
    return within
