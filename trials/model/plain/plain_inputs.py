"""Token ids and labels of a record as the family's own processor of transformers gives them.

Nothing of `trials/model/inputs/chat.py` is used: ids come from `apply_chat_template(tokenize=True)`, and the answers
from what the template writes around other texts in their places, or begin at its `{% generation %}` marks.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import takewhile
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers import PretrainedConfig

from trials.arrays import Ints
from trials.data.records.images import image_pixels
from trials.data.records.sample import IMAGE, Sample, Turn
from trials.model.inputs.chat_template import chatml, default_template, once_ended
from trials.model.inputs.preprocessing import load_tokenizer
from trials.model.inputs.processor import load_processor

Span: TypeAlias = tuple[int, int]
Spans: TypeAlias = list[tuple[Span, Span]]
Message: TypeAlias = dict[str, Any]

_STAND_IN = "4nsw3r{}st4nd1n"
"""Text in the place of an answer, which shows what the template writes around it."""
_ROLES_IN_PARTS = ("system", "user", "assistant"), ("user", "assistant"), ("user",)
"""Turns whose content a template may want as lists of parts."""
_PRINTED = "{'type'", '{"type"'
"""Beginnings of a part that is printed."""
_TODAY = datetime(2025, 1, 1, tzinfo=UTC)
"""The date that templates get which write today's: samples must have the same tokens on every day."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Expected:
    """A record as transformers makes it."""

    input_ids: Ints
    """[tokens]"""
    is_target: NDArray[np.bool_] | None
    """[tokens]: the answers to learn; None where what the template writes does not show where they are."""
    is_free: NDArray[np.bool_]
    """[tokens]: those that may be targets or not: white space around an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """A conversation as text, its images in full."""

    text: str
    input_ids: Ints
    offsets: Ints
    """[tokens, 2]: (start, end) of each in the text."""
    mask: NDArray[np.bool_] | None
    """[tokens]: what the template marks as generated; None where it has no marks."""


class PlainInputs:
    """The processor of a model's folder, or the tokenizer of a model for text alone."""

    def __init__(self, path: str, config: PretrainedConfig, *, trust_remote_code: bool) -> None:
        """Raise ModelError for a folder that lacks a part."""
        self._of_text = getattr(config, "vision_config", None) is None
        load: Any = load_tokenizer if self._of_text else load_processor
        arguments = () if self._of_text else (config,)
        self._own: Any = load(path, *arguments, trust_remote_code=trust_remote_code)
        self._tokenizer: Any = self._own if self._of_text else self._own.tokenizer
        self._template = default_template(self._own.chat_template, self._tokenizer.chat_template)
        self._image_token: str | None = getattr(self._own, "image_token", None)
        self._divides_tiles = config.model_type == "internvl"
        if self._divides_tiles:
            if not self._template:
                self._own.chat_template = self._template = chatml(self._own.image_token)
            # The folder may leave it to a default of the published sizes.
            sides = zip(config.vision_config.image_size, config.vision_config.patch_size, strict=True)
            patches = math.prod(size // patch for size, patch in sides)
            self._own.image_seq_length = int(patches * config.downsample_ratio**2)

    def expected(self, sample: Sample) -> Expected:
        """Return the ids and targets of a conversation without videos.

        Raise what the template and the processor raise for one that they do not take.
        """
        images = _images(sample)
        if self._takes_suffix:
            return self._with_suffix(sample, images)
        messages = self._messages(sample.turns, images)
        written = self._written(messages, images)
        answers = [number for number, turn in enumerate(sample.turns) if turn.role == "assistant"]
        learnt = [sample.turns[number].is_learnt for number in answers]
        spans = self._answer_spans(written.text, messages, answers, images)
        if written.mask is not None:
            spans = _marked(list(_runs(written)), spans, len(answers))
        if spans is None:
            nothing = np.zeros(len(written.input_ids), dtype=np.bool_)
            return Expected(input_ids=written.input_ids, is_target=None, is_free=nothing)
        return _labelled(written, [span for span, is_learnt in zip(spans, learnt, strict=True) if is_learnt])

    def token_ids(self, sample: Sample) -> Ints:
        """Return the ids of a conversation without videos, [tokens]. Raise as `expected` does."""
        images = _images(sample)
        if self._takes_suffix:
            return self._with_suffix(sample, images).input_ids
        return self._written(self._messages(sample.turns, images), images).input_ids

    def text(self, turns: Sequence[Turn]) -> str:
        """Return a conversation without images and videos as text. Raise as `expected` does."""
        return self._rendered(self._messages(turns, ()))

    def ends(self) -> tuple[str | None, str | None]:
        """Return the tokenizer's own (first, last) token of a text, None for one that it does not have."""
        return self._tokenizer.bos_token, self._tokenizer.eos_token

    @property
    def _takes_suffix(self) -> bool:
        """Whether the processor has no chat template, and takes the answer as a suffix of the prompt."""
        return bool(getattr(self._own, "takes_suffix", False))

    def _with_suffix(self, sample: Sample, images: Sequence[Image.Image]) -> Expected:
        """Return what a processor without a chat template makes of a prompt, and of an answer as its suffix."""
        question, answer = sample.turns
        text = question.text.replace(IMAGE, str(self._image_token))
        made = self._own(images=list(images) or None, text=[text], suffix=[answer.text])
        (ids,), (types,) = (np.asarray(made[name]) for name in ("input_ids", "token_type_ids"))
        is_target = (types == 1) & answer.is_learnt
        return Expected(input_ids=ids, is_target=is_target, is_free=np.zeros_like(is_target))

    def _messages(self, turns: Sequence[Turn], images: Sequence[Image.Image]) -> list[Message]:
        """Return the turns in the form in which the template shows all their texts: in parts, or as texts."""
        texts = self._as_texts(turns)
        if self._of_text:
            return texts
        parts = list(self._in_parts(turns, images))
        for roles in _ROLES_IN_PARTS:
            form = [part if part["role"] in roles else text for text, part in zip(texts, parts, strict=True)]
            if self._shows(form, turns, len(images)):
                return form
        return texts

    def _shows(self, messages: Sequence[Message], turns: Sequence[Turn], images: int) -> bool:
        """Return whether the template shows the texts of all turns, and each image, where it gets them in this form."""
        try:
            shown = self._rendered(messages)
        except Exception:  # a template raises what it likes for a form that it does not take
            return False
        pieces = [piece.strip() for turn in turns for piece in turn.text.split(IMAGE)]
        token = self._image_token
        # A template for texts prints a list of parts, as Python or JSON writes it.
        printed = any(shown.count(mark) > sum(turn.text.count(mark) for turn in turns) for mark in _PRINTED)
        return not printed and _in_order(pieces, shown) and (not token or shown.count(token) == images)

    @cached_property
    def _ended(self) -> dict[str, bool]:
        """The mark of images if the template writes a line feed behind them, and whether also among the text."""
        ends = [self._ends_image(before) for before in ("", _STAND_IN)]
        return {IMAGE: ends[1]} if ends[0] else {}

    def _ends_image(self, before: str) -> bool:
        """Return whether the template writes a line feed behind an image that stands behind this text."""
        texts = [{"type": "text", "text": text} for text in (before, _STAND_IN)]
        content = [*texts[: bool(before)], {"type": "image"}, texts[1]]
        try:
            shown = self._rendered([{"role": "user", "content": content}])
        except Exception:  # as in _shows
            return False
        return f"{before}{self._image_token}\n{_STAND_IN}" in shown

    def _as_texts(self, turns: Sequence[Turn]) -> list[Message]:
        token = self._image_token
        return [
            {
                "role": turn.role,
                "content": turn.text.replace(IMAGE, token) if token and turn.role == "user" else turn.text,
            }
            for turn in turns
        ]

    def _in_parts(self, turns: Sequence[Turn], images: Sequence[Image.Image]) -> Iterator[Message]:
        shown = iter(images)
        for turn in turns:
            text = once_ended(turn.text, self._ended)
            first, *others = text.split(IMAGE) if turn.role == "user" else [text]
            content: list[dict[str, Any]] = [{"type": "text", "text": first}] if first or not others else []
            for text in others:
                content.append({"type": "image", "image": next(shown)})
                content += [{"type": "text", "text": text}] if text else []
            yield {"role": turn.role, "content": content}

    def _rendered(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        text: str = self._applied(messages, tokenize=False, add_generation_prompt=asks)
        return text

    def _applied(self, messages: Sequence[Message], **given: Any) -> Any:
        """Return what the template, on the same day whenever it is asked, and the processor make of messages."""
        return self._own.apply_chat_template(list(messages), **given, **self._options())

    def _options(self) -> dict[str, Any]:
        if self._template and "strftime_now" in self._template:
            # In the template's own scope: transformers takes no replacement of the function from outside.
            clock = "".join(
                f"{{% if format == '{code}' %}}{_TODAY.strftime(code)}{{% endif %}}"
                for code in set(re.findall(r"strftime_now\(\s*[\"'](.*?)[\"']\s*\)", self._template))
            )
            return {"chat_template": f"{{% macro strftime_now(format) %}}{clock}{{% endmacro %}}{self._template}"}
        return {}

    def _written(self, messages: Sequence[Message], images: Sequence[Image.Image]) -> _Written:
        marked = bool(_GENERATION.search(self._template or ""))
        given = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": marked}
        if self._of_text:
            text = self._rendered(messages)
            made = self._applied(messages, **given)
            ids, mask = made["input_ids"], made.get("assistant_masks")
        else:
            text, made = self._processed(messages, images, given)
            (ids,) = np.asarray(made["input_ids"]).tolist()
            mask = np.asarray(made["assistant_masks"])[0] if marked else None
        # Whether the processor let the tokenizer add special tokens, such as one for the beginning of a text.
        adds = len(ids) > 0 and self._tokenizer(text, add_special_tokens=False)["input_ids"] != list(ids)
        spanned = self._tokenizer(text, add_special_tokens=adds, return_offsets_mapping=True)
        if spanned["input_ids"] != list(ids):
            raise ValueError("the tokens of the processor are not those of its text")
        return _Written(
            text=text,
            input_ids=np.array(ids, dtype=np.int64),
            offsets=np.array(spanned["offset_mapping"], dtype=np.int64).reshape(-1, 2),
            mask=None if mask is None else np.array(mask, dtype=np.bool_),
        )

    def _processed(
        self, messages: Sequence[Message], images: Sequence[Image.Image], given: dict[str, Any]
    ) -> tuple[str, Any]:
        """Return the text with images in full, and what the processor makes of it."""
        options: dict[str, Any] = {}
        if images and isinstance(messages[0]["content"], str) and not any(_images_of(each, None) for each in messages):
            options["images"] = list(images)
        if images and self._divides_tiles:
            most = max(1, self._own.image_processor.max_patches // len(images))
            options["images_kwargs"] = {"crop_to_patches": True, "max_patches": most}
        recorded: list[str] = []
        tokenizer = self._own.tokenizer
        # A processor returns no text, so the text with images in full is taken on its way to the tokenizer.
        self._own.tokenizer = _Recorder(tokenizer, recorded)
        try:
            made = self._applied(messages, processor_kwargs=options, **given)
        finally:
            self._own.tokenizer = tokenizer
        return recorded[-1], made

    def _answer_spans(
        self, text: str, messages: Sequence[Message], answers: Sequence[int], images: Sequence[Image.Image]
    ) -> Spans | None:
        """Return the (answer, answer with the white space behind it) of each answer in the text.

        None where the text is not what the template writes around other answers.
        """
        if not answers:
            return []
        marks = [_STAND_IN.format(number) for number in range(len(answers))]
        marked = dict(zip(answers, marks, strict=True))
        around = ended = self._around(messages, marked, images)
        if answers[-1] + 1 < len(messages):
            ended = self._around(messages[: answers[-1] + 1], marked, images)
        if around is None or ended is None:
            return None
        # What asks for an answer; whatever stands behind it is written by the model.
        asks = self._asking(messages[: answers[0]])
        heads = [_up_to(fragment, asks) for fragment in around[:-1]]
        if not text.startswith(heads[0]):
            return None
        found, start = list[tuple[Span, Span]](), len(heads[0])
        for number, following in enumerate(around[1:], 1):
            is_last = number == len(heads)
            behind = following if is_last else heads[number]
            end = len(text) - len(behind) if is_last else text.find(behind, start)
            if end < start or not text.startswith(behind, end):
                return None
            # What the template writes behind an answer, whatever follows.
            tail = _common(following, ended[-1])
            found.append(((start, end + len(tail.rstrip())), (start, end + len(tail))))
            start = end + len(behind)
        return found

    def _around(
        self, messages: Sequence[Message], marks: dict[int, str], images: Sequence[Image.Image]
    ) -> list[str] | None:
        """Return the texts before, between and behind the answers, None where the template does not show them once."""
        changed = [
            {
                **each,
                "content": [{"type": "text", "text": marks[number]}]
                if isinstance(each["content"], list)
                else marks[number],
            }
            if number in marks
            else each
            for number, each in enumerate(messages)
        ]
        shown = images[: sum(_images_of(each, self._image_token) for each in messages)]
        text = self._rendered(changed) if self._of_text else self._processed(changed, shown, {"tokenize": True})[0]
        shown_once = all(text.count(mark) == 1 for mark in marks.values())
        return re.split("|".join(map(re.escape, marks.values())), text) if shown_once else None

    def _asking(self, messages: Sequence[Message]) -> str:
        """Return what the template adds to ask for an answer, an empty text where it adds nothing."""
        asked, plain = self._rendered(messages, asks=True), self._rendered(messages)
        return asked.removeprefix(plain) if asked.startswith(plain) else ""


class _Recorder:
    """A tokenizer that notes the texts that it is called with."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        self._tokenizer, self._texts = tokenizer, texts

    def __call__(self, text: Any, *arguments: Any, **options: Any) -> Any:
        self._texts.append(text if isinstance(text, str) else text[0])
        return self._tokenizer(text, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def _images(sample: Sample) -> list[Image.Image]:
    return [Image.fromarray(image_pixels(image)) for image in sample.images]


def _labelled(written: _Written, spans: Sequence[tuple[Span, Span]]) -> Expected:
    text, (starts, ends) = written.text, written.offsets.T
    target, free = np.zeros((2, len(starts)), dtype=np.bool_)
    for (start, end), (_, last) in spans:
        first = end - len(text[start:end].lstrip())
        # As transformers marks them: all tokens with a character of the answer.
        target |= (starts < end) & (ends > first) & (ends > starts)
        free |= (starts < last) & (ends > len(text[:first].rstrip()))
    return Expected(input_ids=written.input_ids, is_target=target, is_free=free & ~target)


def _runs(written: _Written) -> Iterator[Span]:
    """Yield the (start, end) in the text of what the template marks as generated."""
    assert written.mask is not None
    edges = np.flatnonzero(np.diff(np.concatenate([[False], written.mask, [False]]).astype(np.int8)))
    for first, behind in zip(edges[::2], edges[1::2], strict=True):
        yield int(written.offsets[first, 0]), int(written.offsets[behind - 1, 1])


def _marked(runs: list[Span], spans: Spans | None, answers: int) -> Spans | None:
    """Return marked answers up to the ends of their turns, which many templates leave out of the marks."""
    found = zip(runs, spans or [(run, run) for run in runs], strict=False)
    ends = [((run[0], max(run[1], one[1])), (run[0], max(run[1], other[1]))) for run, (one, other) in found]
    return ends if len(runs) == answers else None


def _up_to(fragment: str, asks: str) -> str:
    """Return a fragment up to the end of what asks for the answer behind it; whole where nothing does."""
    place = fragment.rfind(asks) if asks else -1
    return fragment if place < 0 else fragment[: place + len(asks)]


def _common(one: str, other: str) -> str:
    """Return the common beginning of two texts."""
    return "".join(first for first, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _in_order(texts: Sequence[str], shown: str) -> bool:
    place = 0
    for text in texts:
        place = shown.find(text, place)
        if place < 0:
            return False
        place += len(text)
    return True


def _images_of(message: Message, token: str | None) -> int:
    content = message["content"]
    if isinstance(content, list):
        return sum(part["type"] == "image" for part in content)
    return content.count(token) if token else 0
