"""The images that a record names: by file, by data: URL, or as bytes."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from trials.data.records.image_options import options_of
from trials.data.records.inline_images import inline_image
from trials.data.records.record import AS_TEXT, Record, RecordError, is_as_text
from trials.data.records.sample import Image, ImageOptions
from trials.data.records.watched import is_nothing

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_FILE = "file://"
_LONGEST_NAME = 4096
"""Bytes of the longest path that Linux opens."""
_SOURCES = ("bytes", "path", "url", "image", "image_url", "base64", "source")
"""Keys under which an object gives its image; `source` as an object alone, as Anthropic writes it."""
_OTHER_SOURCES = ("file_id", "image_bytes", "inline_data", "file_data", "data")
"""Keys under which other programs give one, which is not read."""
# Chats of OpenAI and Anthropic nest two, as `source` in an object with `data`; one more costs nothing.
_MOST_NESTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image with the options that a record gives it."""

    image: Image
    options: ImageOptions | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordImages:
    """The images of a record's own key, in order."""

    images: tuple[Picture, ...] = ()
    sizes: tuple[tuple[int, int] | None, ...] = ()
    """(height, width) as stated; None where the record does not say."""


def images_of(record: Record, keys: tuple[str, ...], root: Path) -> RecordImages:
    """Return the record's images, names being relative to `root`. Raise RecordError.

    An absent, empty or null key is a sample of text alone, as in the loaders of InternVL and LLaVA.
    """
    used = [key for key in keys if not is_nothing(record.get(key))]
    if not used:
        return RecordImages()
    if len(used) > 1:
        raise RecordError(f"images are given under {' and '.join(f'`{key}`' for key in used)}; keep one")
    return _images(record, used[0], root)


def _images(record: Record, key: str, root: Path) -> RecordImages:
    named = record[key]
    if isinstance(named, list):
        sizes = list(zip(_list(record, "height_list"), _list(record, "width_list"), strict=False))
    elif isinstance(named, str | dict | bytes):
        named = [named]
        sizes = [(record.get("height"), record.get("width"))]
    else:
        raise RecordError(
            f"`{key}` is {json.dumps(named, default=str)[:40]}; expected a name, a list of names, or no such key"
        )
    images = tuple(picture_of(value, f"`{key}`", root) for value in named)
    # A record may state fewer sizes than it names images, or more.
    stated = (*(_size(*size) for size in sizes), *(None for _ in images))
    return RecordImages(images=images, sizes=stated[: len(images)])


def picture_of(value: object, what: str, root: Path) -> Picture:
    """Return an image given as a file's name, a data: URL, bytes, or an object with one of them. Raise RecordError."""
    options: list[ImageOptions] = []
    # Chats nest them, as in {"image_url": {"url": ...}}.
    for _ in range(_MOST_NESTED):
        if isinstance(value, dict):
            options += [found] if (found := options_of(value, what)) else []
            value = _source(value, what)
    if len(options) > 1:
        raise RecordError(f"{what} has options of its image in two places; keep one")
    return Picture(image=_content(value, what, root), options=options[0] if options else None)


def _content(value: object, what: str, root: Path) -> Image:
    match value:
        case bytes() if value:
            return value
        case str() if value and is_unicode(value):
            inline = inline_image(value, what)
            return named_file(value, what, root) if inline is None else inline
    raise RecordError(f"{what} is neither a file name nor an image")


def gives_image(value: dict[str, Any]) -> bool:
    """Return whether an object gives an image of its own."""
    return any(_given(value, key) is not None for key in (*_SOURCES, *_OTHER_SOURCES))


def _given(value: dict[str, Any], key: str) -> Any:
    """Return what an object says under a key, None for nothing, without a look at a key that only describes it."""
    found = dict.get(value, key)
    return None if is_nothing(found) or (key == "source" and not isinstance(found, dict)) else value[key]


def _source(value: dict[str, Any], what: str) -> object:
    """Return by what an object gives its image. Raise RecordError for several, and for what is not read."""
    given = {key: found for key in (*_SOURCES, *_OTHER_SOURCES) if (found := _given(value, key)) is not None}
    if "bytes" in given:
        given.pop("path", None)  # only the name that the content had
    if unread := next((key for key in _OTHER_SOURCES if key in given), None):
        raise RecordError(
            f"{what} gives its image under `{unread}`, which is not read; give a file name, bytes or a data: URL"
        )
    if len(given) > 1:
        raise RecordError(f"{what} gives its image under {' and '.join(f'`{key}`' for key in given)}; keep one")
    match next(iter(given.items()), None):
        case "base64", str(content):
            return f"data:;base64,{content}"
        case "source", {"type": "base64", "data": str(content)} as source:
            return f"data:{source.get('media_type')};base64,{content}"
        case "source", {"type": "url", "url": str(name)}:
            return name
        case "source", source:
            raise RecordError(
                f"{what} has a `source` of type {repr(source.get('type'))[:40]}; expected base64 with `data`, or url "
                "with `url`"
            )
        case _, found:
            return found
    return None


def is_unicode(text: str) -> bool:
    """Return False for half of a surrogate pair, which JSON can hold but no tokenizer or file system accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def named_file(name: str, what: str, root: Path) -> Path:
    """Return the path of a file name or file:// URL, relative to `root`. Raise RecordError for any other URL."""
    if is_as_text(name):
        raise RecordError(f"{what} {AS_TEXT}")
    if name[: len(_FILE)].lower() == _FILE:
        name = unquote(name[len(_FILE) :])
    elif _SCHEME.match(name):
        raise RecordError(f"{what} is the URL {name[:80]}, which is not fetched; download it and name the file")
    if len(name) > _LONGEST_NAME:
        raise RecordError(
            f"{what} is a text of {len(name)} characters, which is no file name; an image in base64 begins with "
            "data:image/png;base64, or another kind of image"
        )
    if "\0" in name:
        raise RecordError(f"{what} holds a null character, so it is not a file name")
    return root / name


def _list(record: Record, key: str) -> list[Any]:
    value = record.get(key)
    return value if isinstance(value, list) else []


def _size(height: object, width: object) -> tuple[int, int] | None:
    """Return a stated size, which is only a hint: None for an impossible one."""
    if isinstance(height, int) and isinstance(width, int) and height > 0 and width > 0:
        return height, width
    return None
