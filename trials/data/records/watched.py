"""Records that know what was read of them, so that nothing they say is passed over without a word."""

import re
from functools import lru_cache
from pathlib import PurePath
from typing import Any

from trials.data.records.record import Record, RecordError

IDENTITY = ("id", "_id", "idx", "index", "uid", "uuid", "guid", "sample_id", "record_id", "__index_level_0__")
"""Keys of a record that tell it from others and say nothing else, so that they are not named."""
METADATA = "the metadata "
"""Beginning of what is said of a key that describes a record and was not to be trained on."""
OTHERS = "other keys"
_DESCRIBING = frozenset({
    "access", "answerable", "author", "benchmark", "category", "caption", "class", "collection", "comment",
    "conversation", "count", "country", "created", "creator", "credit", "data", "dataset", "date", "description",
    "difficulty", "domain", "format", "generator", "hash", "height", "host", "id", "idx", "index", "info", "item",
    "lang", "language", "length", "level", "license", "licence", "meta", "metadata", "method", "model", "name",
    "note", "notes", "num", "number", "origin", "original", "provider", "quality", "question", "rating",
    "ratings", "relevance", "sample", "score", "scores", "sha256", "size", "source", "subject", "subset", "tag",
    "tags", "task", "time", "timestamp", "title", "topic", "topics", "turns", "type", "uid", "url", "uuid",
    "version", "width", "year",
})  # fmt: skip
"""Words in the names of keys that describe a record, of published data sets."""
_SETTING = frozenset({
    "crop", "crops", "drop", "duration", "end", "exclude", "fps", "frame", "frames", "max", "min", "page", "pixels",
    "rate", "ratio", "repeat", "repeats", "resize", "resized", "skip", "start", "times",
})  # fmt: skip
"""Words in the names of keys that would change the training."""
_TIMES = frozenset({"time", "timestamp"})
"""Words in the names of keys that may say which part of a video is meant."""
_LOSS = re.compile(r"ignore|label|learn|loss|mask|train|weight", re.IGNORECASE)
_CONTENT = frozenset({
    "answer", "assistant", "audio", "audios", "caption", "completion", "content", "conversation", "conversations",
    "human", "image", "images", "input", "instruction", "messages", "output", "prompt", "query", "question",
    "response", "system", "text", "texts", "user", "value", "video", "videos",
})  # fmt: skip
"""Names of keys that hold what is trained on, in one format or another."""
_CONTENT_ENDS = _CONTENT | {
    "answers", "captions", "context", "dialog", "dialogue", "history", "inputs", "instructions", "message", "outputs",
    "prompts", "questions", "responses", "turns",
}  # fmt: skip
"""Last words in the names of keys that hold such content, as in `source_text`, which is no `text_source`."""
# Choices: keys of one record in a message, and how deep chats nest images (message, content, part).
_MOST_KINDS = 20
_SHOWN_CHARACTERS = 60
_DEPTH = 3
_WORD = re.compile(r"[^\W_]+")
MEDIA = frozenset({
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".heic", ".avif", ".mp4", ".avi", ".mov",
    ".mkv", ".webm", ".wav", ".mp3", ".flac", ".ogg", ".m4a",
})  # fmt: skip
"""Ends of names of images, videos and sounds."""
_MEDIA_STARTS = ("data:", "iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
"""The last four begin images in base64."""
# Bytes of the longest path that Linux opens; longer texts are prose or data.
_LONGEST_NAME = 4096


class Watched(dict[str, Any]):
    """An object of a record, and in it the others, that remembers the keys that were looked at.

    `get` and `[]` look at a key; `in`, iteration and copies do not.
    """

    __slots__ = ("_all", "_level", "_seen")

    def __init__(self, values: Record, above: "Watched | None" = None, key: str = "") -> None:
        super().__init__(values)
        self._level: tuple[str, ...] = (key, *above._level) if above is not None else ()
        self._seen: set[str] = set()
        self._all: list[Watched] = above._all if above is not None else []
        self._all.append(self)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 - this is `get`

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if key not in self._seen:
            self._seen.add(key)
            watched = self._watched(value, key, 2)
            if watched is not value:
                self[key] = value = watched
        return value

    def _watched(self, value: Any, key: str, lists: int) -> Any:
        """Return a value whose objects are watched, too, also in lists and in lists in these."""
        if type(value) is dict:
            return Watched(value, self, key)
        if type(value) is list and lists and any(type(each) in (dict, list) for each in value):
            return [self._watched(each, key, lists - 1) for each in value]
        return value

    def unused(self, *, has_video: bool = False) -> tuple[str, ...]:
        """Return what nothing looked at, of the record that this is: a text for each key and level.

        In a record that `has_video`, a time may be meant to cut it, and describes nothing. Raise RecordError for an
        image, video or sound that only a part of the record names.
        """
        found: dict[str, None] = {}
        for each in self._all:
            for key, value in each.items():
                if key in each._seen or is_nothing(value) or (not each._level and key in IDENTITY):
                    continue
                name = " of ".join(f"`{_shown(part)}`" for part in (key, *each._level))
                if each._level and holds_media(value):
                    raise RecordError(
                        f"{name} holds an image, a video or a sound, which is not read there; name it under a key of "
                        "the record, such as `images`, or remove it"
                    )
                is_metadata = len(each._level) < 2 and _describes(key, has_video) and not _is_content(key, value)
                if key == "split":  # a record of another split has to be seen
                    is_metadata = str(value).lower().startswith("train")
                found[f"{METADATA if is_metadata else 'the key '}{name}"] = None
        named = sorted(found)
        return (*named[:_MOST_KINDS], *([OTHERS] if len(named) > _MOST_KINDS else ()))


def is_nothing(value: object) -> bool:
    """Return whether a value says nothing: null, empty, or an object of such values, as tables hold them."""
    if isinstance(value, dict):
        return all(each is None or each in ("", []) for each in value.values())
    return value is None or value in ("", [])


def holds_media(value: object, depth: int = _DEPTH) -> bool:
    """Return whether a value is an image, a video or a sound, or the name of one, or holds one."""
    match value:
        case bytes():
            return bool(value)
        case str():
            return value.startswith(_MEDIA_STARTS) or (
                len(value) <= _LONGEST_NAME and "\n" not in value and PurePath(value).suffix.lower() in MEDIA
            )
        case dict():
            return depth > 0 and any(holds_media(each, depth - 1) for each in value.values())
        case list():
            return depth > 0 and any(holds_media(each, depth - 1) for each in value)
    return False


@lru_cache(maxsize=4096)
def _describes(key: str, has_video: bool) -> bool:
    words, settings = set(_WORD.findall(key.lower())), _SETTING | _TIMES if has_video else _SETTING
    return key.lower() not in _CONTENT and bool(words & _DESCRIBING) and not (words & settings or speaks_of_loss(key))


def _is_content(key: str, value: object) -> bool:
    """Return whether a value is media, or by the last word of its key a text, question or answer; no number is one."""
    return holds_media(value) or (
        _WORD.findall(key.lower())[-1] in _CONTENT_ENDS and not isinstance(value, int | float)
    )


@lru_cache(maxsize=4096)
def speaks_of_loss(key: str) -> bool:
    """Return whether the name of a key suggests that the loss depends on it."""
    return _LOSS.search(key) is not None


def _shown(key: str) -> str:
    """Return a key for messages: printable, and not too long."""
    return repr(key)[1:-1][:_SHOWN_CHARACTERS]
