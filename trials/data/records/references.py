"""The images that a record names: by file, by data: URL, or as bytes."""

import base64
import binascii
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from trials.data.records.record import Record, RecordError
from trials.data.records.sample import Image

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_NESTED = ("path", "url", "image", "image_url")
"""Keys under which an object names its image."""
_MOST_NESTED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """The images of a record's own key, in order."""

    images: tuple[Image, ...] = ()
    sizes: tuple[tuple[int, int] | None, ...] = ()
    """(height, width) as stated; None where the record does not say."""


def images_of(record: Record, keys: tuple[str, ...], root: Path) -> Images:
    """Return the record's images, names being relative to `root`. Raise RecordError.

    An absent or empty key is a sample of text alone, as in the loaders of InternVL and LLaVA.
    """
    used = [key for key in keys if record.get(key, "") not in ("", [])]
    if not used:
        return Images()
    if len(used) > 1:
        raise RecordError(f"images are given under {' and '.join(f'`{key}`' for key in used)}; keep one")
    return _images(record, used[0], root)


def _images(record: Record, key: str, root: Path) -> Images:
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
    images = tuple(image_of(value, f"`{key}`", root) for value in named)
    # A record may state fewer sizes than it names images, or more.
    stated = (*(_size(*size) for size in sizes), *(None for _ in images))
    return Images(images=images, sizes=stated[: len(images)])


def image_of(value: object, what: str, root: Path) -> Image:
    """Return an image given as a file's name, a data: URL, bytes, or an object with one of them. Raise RecordError."""
    # Chats nest them, as in {"image_url": {"url": ...}}.
    for _ in range(_MOST_NESTED):
        if isinstance(value, dict):
            value = value.get("bytes") or next((value[part] for part in _NESTED if value.get(part) is not None), None)
    match value:
        case bytes() if value:
            return value
        case str() if value.startswith("data:"):
            return _from_data_url(value, what)
        case str() if value and is_unicode(value):
            return named_file(value, what, root)
    raise RecordError(f"{what} is neither a file name nor an image")


def is_unicode(text: str) -> bool:
    """Return False for half of a surrogate pair, which JSON can hold but no tokenizer or file system accepts."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def named_file(name: str, what: str, root: Path) -> Path:
    """Return the path of a file name or file:// URL, relative to `root`. Raise RecordError for any other URL."""
    if name.startswith("file://"):
        name = unquote(name.removeprefix("file://"))
    elif _SCHEME.match(name):
        raise RecordError(f"{what} is the URL {name[:80]}, which is not fetched; download it and name the file")
    if "\0" in name:
        raise RecordError(f"{what} holds a null character, so it is not a file name")
    return root / name


def _from_data_url(url: str, what: str) -> bytes:
    head, comma, body = url.partition(",")
    try:
        content = base64.b64decode(body, validate=True) if head.endswith(";base64") else unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise RecordError(f"{what} is a data: URL that cannot be decoded: {error}") from error
    if not comma or not content:
        raise RecordError(f"{what} is a data: URL without content")
    return content


def _list(record: Record, key: str) -> list[Any]:
    value = record.get(key)
    return value if isinstance(value, list) else []


def _size(height: object, width: object) -> tuple[int, int] | None:
    """Return a stated size, which is only a hint: None for an impossible one."""
    if isinstance(height, int) and isinstance(width, int) and height > 0 and width > 0:
        return height, width
    return None
