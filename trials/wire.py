"""JSON of every value that crosses a process, file or database boundary.

Numbers are finite, and whole ones have at most 64 bits: others make no sense as measurements, and databases cannot
store them, so they are neither written nor read.
"""

import hashlib
import json
import re
from collections.abc import Set
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, overload

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_json

from trials.errors import OtherForm, WireError

T = TypeVar("T")
WHOLE = range(-(1 << 63), 1 << 63)
"""Whole numbers of 64 bits."""
_LONG = re.compile(r"[0-9]{19}")  # `\d` also looks for digits of other scripts, which takes twice as long
"""Matches in every text with a whole number of more than 64 bits."""
_OTHER_FIELDS = {"missing", "unexpected_keyword_argument"}
"""pydantic's names for a missing and an unknown field of a dataclass."""
_NOT_FINITE = re.compile(r"NaN|Infinity")
"""Matches in every encoded text with a number that is not finite."""


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    # `| None`: pydantic hands a configuration on to dataclasses only from a type around them.
    config = ConfigDict(extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")
    return TypeAdapter(kind | None, config=config)


def encode(value: object, kind: Any = None) -> str:
    """Return the canonical JSON of `value`: keys in field order, no white space, so equal values give equal text.

    `kind` is needed for a union (`Outcome`, `Packing`), whose members are distinguished by their `kind` field.
    Raise WireError for a number that is not finite or has more than 64 bits.
    """
    described_by: Any = kind or type(value)
    text = _adapter(described_by).dump_json(value).decode()
    if _LONG.search(text) or _NOT_FINITE.search(text):
        _validated("write", described_by, text)
    return text


@overload
def decode(kind: type[T], text: str | bytes) -> T: ...
@overload
def decode(kind: Any, text: str | bytes) -> Any: ...
def decode(kind: Any, text: str | bytes) -> Any:
    """Return the value of type `kind` (a class, or a union such as `Outcome`) that `encode` wrote.

    Raise WireError when the text is no JSON, a field is missing, unknown or of the wrong type, or a number is not
    finite or has more than 64 bits; and InvalidPlan when a plan contradicts itself.
    """
    value = _validated("read", kind, text)
    if value is None:
        raise WireError(f"cannot read a {_name(kind)}: the message is null")
    return value


def _validated(verb: str, kind: Any, text: str | bytes) -> Any:
    try:
        value = _adapter(kind).validate_json(text, strict=True)  # a number in quotes would have no bounds
        if _LONG.search(text if isinstance(text, str) else text.decode()):
            json.loads(text, parse_int=_whole)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the message"
        fault = OtherForm if {each["type"] for each in error.errors()} & _OTHER_FIELDS else WireError
        given = f", not {first['input']}" if isinstance(first["input"], int | float) else ""
        # pydantic speaks of its own discriminators here.
        said = "its kind is missing" if first["type"] == "union_tag_not_found" else first["msg"]
        raise fault(f"cannot {verb} a {_name(kind)}: {where}: {said}{given}") from error
    except ValueError as error:
        raise WireError(f"cannot {verb} a {_name(kind)}: {error}") from error
    return value


def _whole(digits: str) -> int:
    if len(digits) > 20 or int(digits) not in WHOLE:
        raise ValueError(f"{digits[:24]} is no whole number of 64 bits")
    return int(digits)


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))


def read(kind: type[T], path: Path) -> T | None:
    """Return the encoded value in a file, or None while there is no such file. Raise WireError as `decode` does."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    return decode(kind, text)


def to_document(value: object) -> Any:
    """Return the value as plain JSON values, for people and their programs; None for a number that is not finite."""
    return json.loads(to_json(value, inf_nan_mode="null"))


def canonical(value: object, *, always: Set[str] = frozenset(), never: Set[str] = frozenset()) -> str:
    """Return the canonical JSON from which the digest of `value` is computed.

    A field at its default is left out, so that a new field with a default changes no digest. `always` and `never` name
    fields, at any depth, that are included even at their default, or never.
    """
    kind: Any = type(value)
    whole, changed = (_adapter(kind).dump_python(value, mode="json", exclude_defaults=short) for short in (False, True))
    return to_json(_counted(whole, changed, always, never)).decode()


def _counted(whole: Any, changed: Any, always: Set[str], never: Set[str]) -> Any:
    if isinstance(whole, dict):
        names = [name for name in whole if name not in never and (name in changed or name in always)]
        return {name: _counted(whole[name], changed.get(name, whole[name]), always, never) for name in names}
    if isinstance(whole, list):
        return [_counted(*pair, always, never) for pair in zip(whole, changed, strict=True)]
    return whole


def digest(value: object, *, always: Set[str] = frozenset(), never: Set[str] = frozenset()) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of the value's `canonical` text."""
    return hashlib.sha256(canonical(value, always=always, never=never).encode()).hexdigest()[:16]
