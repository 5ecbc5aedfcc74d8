"""JSON for every value that crosses a process, file or database border."""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic import ConfigDict, TypeAdapter, ValidationError

from trials.errors import WireError

T = TypeVar("T")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    # `| None`: pydantic hands a configuration on to dataclasses only from a type around them.
    return TypeAdapter(kind | None, config=ConfigDict(extra="forbid"))


def encode(value: object, kind: Any = None) -> str:
    """Canonical JSON of `value`: keys in field order, no white space, so that equal values give equal text.

    `kind` is needed for a union (`Outcome`, `Packing`), whose members are then told apart by their `kind` field.
    """
    described_by: Any = kind or type(value)
    return _adapter(described_by).dump_json(value).decode()


@overload
def decode(kind: type[T], text: str | bytes) -> T: ...
@overload
def decode(kind: Any, text: str | bytes) -> Any: ...
def decode(kind: Any, text: str | bytes) -> Any:
    """The value of type `kind` (a class, or a union such as `Outcome`) that `encode` wrote.

    Raises WireError when the text is no JSON, or a field is missing, unknown or of the wrong type, and InvalidPlan when
    a plan contradicts itself.
    """
    name = getattr(kind, "__name__", str(kind))
    try:
        value = _adapter(kind).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the message"
        raise WireError(f"cannot read a {name}: {where}: {first['msg']}") from error
    if value is None:
        raise WireError(f"cannot read a {name}: the message is null")
    return value


def write(path: Path, value: object, kind: Any = None) -> None:
    """Encodes to a file that appears under its name only when it is complete."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(encode(value, kind))
    temporary.replace(path)


@overload
def read(kind: type[T], path: Path) -> T | None: ...
@overload
def read(kind: Any, path: Path) -> Any: ...
def read(kind: Any, path: Path) -> Any:
    """What `write` left, or None while there is no such file. Raises WireError as `decode` does."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    return decode(kind, text)


def to_document(value: object) -> Any:
    """The value as plain JSON values: what `encode` writes, before it is text."""
    return json.loads(encode(value))


def digest(value: object, kind: Any = None, *, with_defaults: bool = True) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of the value's canonical JSON.

    Without defaults, a field that has its default value does not count.
    """
    described_by: Any = kind or type(value)
    text = _adapter(described_by).dump_json(value, exclude_defaults=not with_defaults)
    return hashlib.sha256(text).hexdigest()[:16]
