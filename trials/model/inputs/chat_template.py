"""A model's own chat template, and the forms in which it wants the content of a turn."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from trials.data.records.sample import IMAGE, VIDEO, Role, Turn
from trials.errors import ModelError
from trials.model.hub import local_folder

REFUSALS = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
"""Exceptions of a template for a conversation that it does not support."""
_PROBE = 'Is "it\'s" in C:\\?', 'Yes, "it\'s" in C:\\.'
"""A question and its answer. Neither Python nor JSON writes them as they are, so that a template that prints a list of
parts, instead of the text in it, does not show them."""
_FORMS: tuple[frozenset[Role], ...] = (frozenset({"user", "assistant"}), frozenset({"user"}))
"""Turns whose content templates want as lists of parts, besides that of the system; most for images want all so."""
_TODAY = datetime(2025, 1, 1, tzinfo=UTC)
"""Date for templates that write today's, as Mistral 3's does. With another one a sample would have other tokens, and
perhaps more of them, when it is read than when it was measured, or after a training was resumed."""
_CLOCK = (
    "{% macro strftime_now(format) %}{{ format"
    + "".join(f".replace('%{code}', '{_TODAY:%{code}}')" for code in ("-d", "-m", *"aAbBdFHIjmMpSyY"))
    + " }}{% endmacro +%}"
)
"""Definition that stands before transformers' own, of which a template sees no replacement from outside."""
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}IMAGE"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_FILES = ("processor_config.json", "chat_template.json", "chat_template.jinja", "tokenizer_config.json")
"""Files that may hold a model's template; transformers takes the first that does."""


def template_file(model: str) -> str:
    """Return the name of the file in a model's folder that holds its chat template."""
    folder = local_folder(model, _FILES)
    return next((name for name in _FILES if _holds_template(folder / name)), "chat_template.jinja")


def _holds_template(path: Path) -> bool:
    return path.is_file() and (
        path.suffix == ".jinja" or json.loads(path.read_bytes()).get("chat_template") is not None
    )


def default_template(*stated: str | Mapping[str, str] | None) -> str | None:
    """Return the first template that is stated; of several with names, the one that transformers takes by itself."""
    template = next((each for each in stated if each), None)
    return template.get("default") if isinstance(template, Mapping) else template


def chatml(image_token: str) -> str:
    """Return the template of a family that is trained with ChatML, for a folder that has none."""
    return _CHATML.replace("IMAGE", image_token)


class ChatTemplate:
    """Writer of conversations as the model's text."""

    def __init__(self, tokenizer: Any, template: str | None, image_tokens: Collection[str], video: str | None) -> None:
        """Probe the template: `image_tokens` are what it writes for an image, `video` for a video.

        Raise ModelError for a template that shows no image or no text.
        """
        self._tokenizer = tokenizer
        is_dated = isinstance(template, str) and "strftime_now" in template
        self._template = f"{_CLOCK}{template}" if is_dated else template
        self._image_tokens = image_tokens
        self._video_token = video
        self._ended: dict[str, bool] = {}
        self._in_parts = self._turns_in_parts()
        if self._in_parts:
            self._ended = dict(self._ended_marks())

    def rendered(
        self,
        turns: tuple[Turn, ...],
        *,
        asks: bool = False,
        in_parts: Collection[Role] | None = None,
        videos: bool = False,
    ) -> str:
        """Return the conversation as the chat template writes it; `asks` adds what begins the assistant's answer.

        With `videos`, each `<video>` of a user's turn shows one. `in_parts` are the roles whose content is given as
        lists of parts; None for those of the template.
        """
        in_parts = self._in_parts if in_parts is None else in_parts
        messages = [{"role": turn.role, "content": self._content(turn, in_parts, videos)} for turn in turns]
        text: str = self._tokenizer.apply_chat_template(
            messages, chat_template=self._template, tokenize=False, add_generation_prompt=asks
        )
        return text

    def shows_videos(self) -> bool:
        """Return whether the template shows a video as one token, with the text of the turn."""
        if not self._video_token:
            return False
        try:
            text = self.rendered((Turn(role="user", text=VIDEO + _PROBE[0]),), videos=True)
        except REFUSALS:
            return False
        return text.count(self._video_token) == 1 == text.count(_PROBE[0]) and not any(
            token in text for token in self._image_tokens
        )

    def answer_end(self) -> str:
        """Return what the template writes behind an answer."""
        return self.rendered(self._probe()).partition(_PROBE[1])[2]

    def other_prompt(self) -> tuple[str, str] | None:
        """Return what stands between a question and its answer, and what stands behind a question that asks for one.

        None where the conversation begins as the prompt does, so that both are the same for the model.
        """
        question, answer = self._probe()
        with suppress(*REFUSALS):
            asked, whole = self.rendered((question,), asks=True), self.rendered((question, answer))
            prompt = asked.partition(_PROBE[0])[2]
            between = whole.partition(_PROBE[0])[2].partition(_PROBE[1])[0]
            # A prompt may write the beginning of an answer, such as `<think>`, which answers of the data may have too.
            begun = prompt[len(between) :] if prompt.startswith(between) else ""
            text = f"{begun if begun.strip() else ''}{answer.text}"
            if not self.rendered((question, replace(answer, text=text))).startswith(asked):
                return between, prompt
        return None

    def _probe(self) -> tuple[Turn, ...]:
        question, answer = _PROBE
        asked = Turn(role="user", text=IMAGE * len(self._image_tokens) + question)
        return asked, Turn(role="assistant", text=answer)

    def _content(self, turn: Turn, in_parts: Collection[Role], videos: bool) -> str | list[dict[str, str]]:
        if turn.role in in_parts:
            return list(parts(replace(turn, text=once_ended(turn.text, self._ended)), videos=videos))
        text = turn.text
        for token in self._image_tokens if turn.role == "user" else ():
            text = text.replace(IMAGE, token)
        if videos and turn.role == "user" and self._video_token:
            text = text.replace(VIDEO, self._video_token)
        return text

    def _turns_in_parts(self) -> frozenset[Role]:
        """Return the roles whose content the template wants as lists of parts, and not as texts."""
        probe = self._probe()
        # A system prompt may be joined to a text, as in Pixtral's.
        for roles in _FORMS if self._image_tokens else ():
            if self._shows(probe, roles, self._image_tokens):
                asked = Turn(role="system", text=_PROBE[1]), Turn(role="user", text=_PROBE[0])
                with_system = roles | frozenset[Role]({"system"})
                return with_system if self._shows(asked, with_system) else roles
        if self._shows(probe, (), self._image_tokens):
            return frozenset()
        shown = "".join(f"an image as {token} once, with " for token in self._image_tokens)
        raise ModelError(
            f"the chat template is missing or does not show {shown}the text of each turn once; save the model's own "
            "template with its tokenizer or processor"
        )

    def _shows(self, turns: tuple[Turn, ...], in_parts: Collection[Role], tokens: Collection[str] = ()) -> bool:
        """Return whether the template shows both texts of the probe, and each of `tokens`, once."""
        try:
            text = self.rendered(turns, in_parts=in_parts)
        except REFUSALS:
            return False
        return all(text.count(each) == 1 for each in (*tokens, *_PROBE))

    def _ended_marks(self) -> Iterator[tuple[str, bool]]:
        """Yield marks of a user's text behind which the template writes a line feed, and whether among the text too."""
        shown = {IMAGE: next(iter(self._image_tokens), None), VIDEO: self._video_token}
        for mark, token in shown.items():
            if token and self._ends(mark, token, ""):
                yield mark, self._ends(mark, token, _PROBE[0])

    def _ends(self, mark: str, token: str, before: str) -> bool:
        """Return whether the template writes a line feed behind what stands for a mark behind this text."""
        turn = Turn(role="user", text=f"{before}{mark}{_PROBE[1]}")
        with suppress(*REFUSALS):
            return f"{before}{token}\n{_PROBE[1]}" in self.rendered((turn,), videos=mark == VIDEO)
        return False


def once_ended(text: str, marks: Mapping[str, bool]) -> str:
    """Return a user's text without the line feeds behind such `marks` that the template writes.

    LLaVA's and InternVL's records have one behind each image. A template that writes one as well would show two, which
    no prompt has that names its images apart from its text. Where a mark has False, the template writes images before
    all text, so that line feeds are left out at the beginning alone.
    """
    for mark in (mark for mark, among_text in marks.items() if among_text):
        text = text.replace(f"{mark}\n", mark)
    first = [mark for mark, among_text in marks.items() if not among_text]
    begin = re.match(f"(?:(?:{'|'.join(first)})\n?)+", text) if first else None
    return text if begin is None else begin[0].replace("\n", "") + text[begin.end() :]


def parts(turn: Turn, *, videos: bool = False) -> Iterator[dict[str, str]]:
    """Yield the content of a turn in parts, as templates take them."""
    marks = {IMAGE: "image", VIDEO: "video"} if videos else {IMAGE: "image"}
    pieces = re.split(f"({'|'.join(marks)})", turn.text) if turn.role == "user" else [turn.text]
    for number, piece in enumerate(pieces):
        if number % 2:
            yield {"type": marks[piece]}
        elif piece or len(pieces) == 1:
            yield {"type": "text", "text": piece}
