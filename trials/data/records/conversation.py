"""Records of any format of conversations, read by the `Columns` that say where the parts stand."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from trials.data.records.columns import Chat, Columns, Pairs
from trials.data.records.placement import Role, Said, placed
from trials.data.records.record import Record, RecordError
from trials.data.records.references import image_of, images_of, is_unicode
from trials.data.records.sample import IMAGE, VIDEO, Image, Sample, Video
from trials.data.records.video_references import video_of, videos_of

_TEXT_KEYS = ("value", "content", "text")
_WEIGHTS = ("loss", "weight", "train")
"""Keys by which a turn is left out of the loss, where they are false or 0."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
_SHOWN_KEYS, _SHOWN_CHARACTERS = 10, 120
_REMEDIES = {
    "video": "name the column of the videos",
    "videos": "name the column of the videos",
    "tools": "describe them in the system turn",
}
_IMAGE_KEYS = ("image", "image_url", "url", "path", "bytes")
_VIDEO_KEYS = ("video", "video_url", "frames", "url", "path")


def sample(record: Record, columns: Columns, root: Path) -> Sample:
    """Return the record's conversation; names of images and videos are relative to `root`. Raise RecordError."""
    for key in columns.unsupported:
        if record.get(key):
            raise RecordError(f"`{key}` is not supported; {_REMEDIES.get(key, 'remove it, or leave the record out')}")
    turns = _chat(record, columns, root) if isinstance(columns, Chat) else _pairs(record, columns)
    said: list[Said] = []
    if columns.system and record.get(columns.system):
        said.append(Said(role="system", text=_text(record[columns.system], f"`{columns.system}`")))
    said += turns
    videos = videos_of(record, columns.videos, root)
    return placed(said, images_of(record, columns.images, root), videos, columns.unplaced, columns.unplaced_end)


# --- a list of turns ---


def _chat(record: Record, columns: Chat, root: Path) -> Iterator[Said]:
    turns = record.get(columns.turns)
    if not isinstance(turns, list):
        fault = "is not a list" if columns.turns in record else "is missing"
        raise RecordError(f"`{columns.turns}` {fault}; the record has {_keys(record)}")
    if not turns:
        raise RecordError(f"`{columns.turns}` is empty")
    for number, turn in enumerate(turns, 1):
        yield _turn(turn, f"turn {number}", columns, root)


def _turn(turn: object, where: str, columns: Chat, root: Path) -> Said:
    if not isinstance(turn, dict):
        raise RecordError(f"{where} is not an object with `{columns.role}` and `{columns.text}`")
    role = _role(turn.get(columns.role), where, columns)
    for key in ("tool_calls", "function_call"):
        if turn.get(key):
            raise RecordError(f"{where} has `{key}`, which is not supported; write the call as its text")
    if reasoning := next((key for key in _REASONING if turn.get(key)), None):
        raise RecordError(
            f"{where} has `{reasoning}` as well as its text, which is not supported; write it into the text"
        )
    is_learnt = all(turn.get(key) is None or bool(turn[key]) for key in _WEIGHTS)
    content = turn.get(columns.text)
    if isinstance(content, list):
        return replace(_parts(content, role, where, root), is_learnt=is_learnt)
    if not isinstance(content, str):
        slip = next((key for key in _TEXT_KEYS if key in turn and content is None and key != columns.text), None)
        hint = f"; it has `{slip}`, rename that to `{columns.text}`" if slip else ""
        raise RecordError(f"{where} has no text under `{columns.text}`{hint}")
    return replace(_said(role, _text(content, where)), is_learnt=is_learnt)


def _role(name: object, where: str, columns: Chat) -> Role:
    sides: dict[Role, tuple[str, ...]] = {
        "user": columns.users,
        "assistant": columns.assistants,
        "system": columns.systems,
    }
    for role, names in sides.items():
        if isinstance(name, str) and name in names:
            return role
    *others, last = (name for names in sides.values() for name in names)
    raise RecordError(f"{where} is from {repr(name)[:40]}; expected {', '.join(others)} or {last}")


def _parts(parts: list[Any], role: Role, where: str, root: Path) -> Said:
    """Return a turn from a list of texts, images and videos, as OpenAI, TRL and Qwen write it."""
    texts: list[str] = []
    images: list[Image | None] = []
    videos: list[Video | None] = []
    for number, part in enumerate(parts, 1):
        what = f"part {number} of {where}"
        match part:
            case {"type": "text", "text": text}:
                texts.append(_text(text, what))
                images += [None] * texts[-1].count(IMAGE)
                videos += [None] * texts[-1].count(VIDEO)
            case {"type": "image" | "image_url"}:
                texts.append(IMAGE)
                # A part without an image of its own shows the next one of the record's key.
                own = any(part.get(key) is not None for key in _IMAGE_KEYS)
                if isinstance(part.get("base64"), str):
                    images.append(image_of(f"data:;base64,{part['base64']}", what, root))
                else:
                    images.append(image_of(part, what, root) if own else None)
            case {"type": "video" | "video_url"}:
                texts.append(VIDEO)
                own = any(part.get(key) is not None for key in _VIDEO_KEYS)
                videos.append(video_of(part, what, root) if own else None)
            case _:
                kind = part.get("type") if isinstance(part, dict) else part
                raise RecordError(f"{what} is {repr(kind)[:40]}; expected a text, an image or a video")
    if role == "user":
        has_video = any(part["type"] != "text" and text == VIDEO for part, text in zip(parts, texts, strict=True))
        return Said(role=role, text="".join(texts), images=tuple(images), videos=tuple(videos), has_video=has_video)
    if other := next((part["type"] for part in parts if part["type"] != "text"), None):
        kind = "a video" if other.startswith("video") else "an image"
        raise RecordError(f"{where} contains {kind}, but only turns of the user may")
    return Said(role=role, text="".join(texts))


def _said(role: Role, text: str) -> Said:
    """Return a turn of text alone; sides other than the user may spell the placeholders."""
    if role != "user":
        return Said(role=role, text=text)
    return Said(role=role, text=text, images=(None,) * text.count(IMAGE), videos=(None,) * text.count(VIDEO))


# --- questions and answers ---


def _pairs(record: Record, columns: Pairs) -> Iterator[Said]:
    history = record.get(columns.history) if columns.history else None
    if history is not None and not isinstance(history, list):
        raise RecordError(f"`{columns.history}` is not a list of questions with their answers")
    for number, pair in enumerate(history or (), 1):
        yield from _pair(pair, f"pair {number} of `{columns.history}`", columns)
    if columns.answer in record or not history:
        yield from _pair(record, "the record", columns)


def _pair(pair: object, where: str, columns: Pairs) -> Iterator[Said]:
    match pair:
        case [question, answer]:
            questions = [question]
        case dict() if any(key in pair for key in columns.questions):
            questions = [pair[key] for key in columns.questions if pair.get(key)]
            answer = pair.get(columns.answer)
        case _:
            keys = pair if isinstance(pair, dict) else ()
            raise RecordError(f"{where} has no question under {_keys(columns.questions)}; it has {_keys(keys)}")
    yield _said("user", "\n".join(_text(question, f"the question of {where}") for question in questions))
    yield _said("assistant", _text(answer, f"the answer of {where}"))


# --- both ---


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise RecordError(f"{what} is not a text but {'null' if value is None else repr(value)[:40]}")
    if not is_unicode(value):
        raise RecordError(f"{what} holds half of a surrogate pair, which is not a character")
    return value


def _keys(keys: Iterable[str]) -> str:
    shown = ", ".join(islice(keys, _SHOWN_KEYS)).encode(errors="backslashreplace").decode()
    return shown[:_SHOWN_CHARACTERS] or "no keys"
