"""The answers of a conversation, found in the text that a chat template makes of it, and the tokens that end them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Protocol

from transformers import GenerationConfig, PretrainedConfig

from trials.data.records.sample import IMAGE, VIDEO, Turn
from trials.errors import DataError

_MARKS = range(0xE000, 0xF8FF)
"""Characters for private use, which no template looks for."""
_PLACES = 1.0, 0.5, 0.75, 0.25
"""Where in a text a mark may stand: a template may look at the beginning and the end of it."""
_REASONING_END = re.compile(r"</\w+>|\u25c1/\w+\u25b7|\[/\w+\]")
"""End of a model's reasoning, as in `</think>`."""
_PLACEHOLDERS = re.compile(f"{IMAGE}|{VIDEO}")
# A choice: the beginning of a text says which one it is.
_SHOWN = 40
REASONING = "reasoning at the beginning of answers, which the model's chat template leaves out"
PLACES = "places of images or videos among the text of a question, which the model's chat template does not keep"


class Write(Protocol):
    """The chat template."""

    def __call__(self, turns: tuple[Turn, ...], *, asks: bool = False) -> str:
        """Return the text of turns; `asks` adds what begins the assistant's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearntAnswer:
    """An answer to learn."""

    start: int
    """Start of what the answer adds to its prompt, in characters of the whole conversation's text."""
    said: int
    """End of its own text. What the template writes behind it is learnt in whole tokens."""
    end: int
    """End of what the template writes behind it, such as `<|im_end|>`."""
    unused: str | None
    """What the template leaves out of the answer."""


def find_answers(turns: tuple[Turn, ...], text: str, write: Write) -> Iterator[LearntAnswer]:
    """Yield the answers to learn in `text`, which `write` makes of `turns`.

    Raise DataError where the text does not hold all of a turn, but for reasoning of an answer.
    """
    rendering = _Rendering(turns=turns, text=text, write=write)
    _check_others(rendering)
    for number, turn in enumerate(turns):
        if turn.role == "assistant" and turn.is_learnt:
            yield rendering.answer(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rendering:
    """A template may write an earlier turn otherwise than it did while that turn was the last."""

    turns: tuple[Turn, ...]
    text: str
    write: Write

    def answer(self, number: int) -> LearntAnswer:
        """Return the answer that is the turn `number`. Raise DataError where the text does not hold it."""
        prompt = self.write(self.turns[:number], asks=True)
        start = len(prompt) if self.text.startswith(prompt) else self._start(number, prompt)
        answered = self.text if number + 1 == len(self.turns) else self.write(self.turns[: number + 1])
        said = end = len(answered)
        if not self.text.startswith(answered):
            said, end = self._end(number, answered)
        unused = None
        if not _holds(self.text[start:end], given := self.turns[number].text):
            # The prompt may write the beginning of an answer, such as `<think>`.
            asked = len(_common(self.write(self.turns[:number]), self.text))
            unused = _left_out(given, self.text[min(asked, start) : end], number)
        return LearntAnswer(start=start, said=said, end=end, unused=unused)

    def shows(self, number: int) -> bool:
        """Return whether the text holds a turn, which it is known to do where no other turn says the same."""
        said, mark = self.turns[number].text, self._mark
        others = " ".join(turn.text for other, turn in enumerate(self.turns) if other != number)
        if not said.strip() or not _holds(others, said):
            return True
        places = dict.fromkeys(round(len(said) * part) for part in _PLACES)
        return any(mark in self._written(self.turns, number, f"{said[:each]}{mark}{said[each:]}") for each in places)

    def _start(self, number: int, prompt: str) -> int:
        """Return where the text leaves the prompt for the turn; `prompt` is written of the turns before alone."""
        asked = self._content_end(number - 1, self.turns, self.text)
        asking = self._content_end(number - 1, self.turns[:number], prompt, asks=True)
        mark = self._mark
        other = self._written(self.turns, number, mark).partition(mark)
        if not other[1] or not other[0].startswith(self.text[:asked]):
            raise self._unfound(number)
        # An answer may begin as what a prompt adds does, such as `<`; another answer in its place does not.
        begun = (_common(prompt[asking:], each) for each in (self.text[asked:], other[0][asked:] + mark))
        return asked + min(map(len, begun))

    def _end(self, number: int, answered: str) -> tuple[int, int]:
        """Return `said` and `end` of an answer; `answered` is the conversation up to it."""
        tail = answered[self._content_end(number, self.turns[: number + 1], answered) :]
        end = self._content_end(number, self.turns, self.text)
        return end, end + len(_common(tail, self.text[end:]))

    def _content_end(self, number: int, turns: tuple[Turn, ...], text: str, *, asks: bool = False) -> int:
        """Return where the content of a turn ends in `text`, which is written of `turns`. Raise DataError."""
        mark, content = self._mark, turns[number].text.rstrip()
        for place in dict.fromkeys(round(len(content) * part) for part in _PLACES):
            marked = self._written(turns, number, f"{content[:place]}{mark}{turns[number].text[place:]}", asks=asks)
            head, found, tail = marked.partition(mark)
            rest = content[place:]
            if found and head + tail == text and tail.startswith(rest):
                return len(head) + len(rest)
        raise self._unfound(number)

    def _written(self, turns: tuple[Turn, ...], number: int, content: str, *, asks: bool = False) -> str:
        return self.write((*turns[:number], replace(turns[number], text=content), *turns[number + 1 :]), asks=asks)

    @property
    def _mark(self) -> str:
        return next(mark for mark in map(chr, _MARKS) if mark not in self.text)

    def _unfound(self, number: int) -> DataError:
        return DataError(
            f"turn {number + 1}, {_shown(self.turns[number].text)}, cannot be found in what the model's chat template "
            "writes of the conversation; take it out, or save a template that writes every turn"
        )


def _check_others(rendering: _Rendering) -> None:
    """Raise DataError where the text does not hold a turn that is no answer; some templates write no system prompt."""
    written, place = _squeezed(rendering.text), 0
    for number, turn in enumerate(rendering.turns):
        if turn.role == "assistant":
            continue
        # Questions follow each other, and two may be alike; a system prompt may stand with the last of them.
        found = _end_of(_PLACEHOLDERS.split(turn.text), written, place if turn.role == "user" else 0)
        if found < 0 or (turn.role == "system" and not rendering.shows(number)):
            what = "the system prompt" if turn.role == "system" else f"turn {number + 1}, {_shown(turn.text)}"
            raise DataError(
                f"the model's chat template leaves out {what}; take that out of the record, or save a template "
                "that writes it"
            )
        place = found if turn.role == "user" else place


def keeps_places(turns: tuple[Turn, ...], text: str, tokens: Mapping[str, str]) -> bool:
    """Return whether images and videos stand in `text` among the words around them in the questions.

    `tokens` has what the text shows for the placeholders `<image>` and `<video>`, or one of them.
    """
    placeholders = re.compile(f"({'|'.join(tokens)})")
    pieces = [piece for turn in turns if turn.role == "user" for piece in placeholders.split(turn.text)]
    return _end_of((tokens.get(piece, piece) for piece in pieces), _squeezed(text), 0) >= 0


def _end_of(parts: Iterable[str], written: str, start: int) -> int:
    """Return where texts that follow each other end in what is written from `start` on, -1 where one is not there."""
    for part in map(_squeezed, parts):
        found = written.find(part, start)
        if found < 0:
            return found
        start = found + len(part)
    return start


def _left_out(given: str, written: str, number: int) -> str | None:
    """Return what the text of an answer does not hold. Raise DataError for anything but its reasoning."""
    if _holds(written, given):
        return None
    *_, end = (
        0,
        *(match.end() for match in _REASONING_END.finditer(given.rstrip()) if match.end() < len(given.rstrip())),
    )
    if end and _holds(written, given[end:]):
        return REASONING
    raise DataError(
        f"the model's chat template leaves out all or a part of turn {number + 1}, {_shown(given)}; correct that "
        "answer, or save a template that writes it"
    )


def _holds(text: str, part: str) -> bool:
    return _squeezed(part) in _squeezed(text)


def _squeezed(text: str) -> str:
    """Return a text without white space, which templates strip and add."""
    return "".join(text.split())


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


def _common(prefix: str, text: str) -> str:
    """Return the common beginning of two texts."""
    if text.startswith(prefix):
        return prefix
    return prefix[: next(number for number, pair in enumerate(zip_longest(prefix, text)) if pair[0] != pair[1])]


def stop_tokens(path: str, config: PretrainedConfig, tokenizer: Any) -> frozenset[int]:
    """Return the ids at which transformers ends an answer of the model folder, and its tokenizer's end of text."""
    try:
        settings = GenerationConfig.from_pretrained(path)
    except OSError:  # where there is none, transformers makes it from the configuration
        settings = GenerationConfig.from_model_config(config)
    stated = settings.eos_token_id
    every = [*(stated if isinstance(stated, list) else [stated]), tokenizer.eos_token_id]
    return frozenset(token for token in every if token is not None)
