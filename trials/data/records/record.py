"""One record as JSON text."""

import codecs
import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

from trials.errors import in_one_line

# A choice: a chat with several inline images has some MB.
MAX_RECORD_BYTES = 16 << 20
"""A longer record is not read into memory, and is reported."""

Record: TypeAlias = dict[str, Any]

AS_TEXT = (
    "is a list or an object as text; write it as such in JSON Lines or Parquet, since cells of CSV and TSV are plain "
    "text"
)
"""What is wrong with a value for which `is_as_text` is true."""
_AS_TEXT = re.compile(r"\[\s*\]|\[\s*[\[{\"'].*\]|\{\s*[\"'].*\}", re.DOTALL)


class RecordError(ValueError):
    """A record that cannot be used; the message says what is wrong with it, in one line."""

    def __init__(self, message: str) -> None:
        super().__init__(in_one_line(message))


def is_as_text(value: object) -> bool:
    """Return whether it is a text with a list or an object in it, as JSON or Python writes them."""
    return isinstance(value, str) and _AS_TEXT.fullmatch(value.strip()) is not None


def once(pairs: list[tuple[str, Any]]) -> Record:
    """Return the object of these keys and values. Raise RecordError for a key that is given twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise RecordError(f'"{repr(twice)[1:-1][:40]}" is given twice, and one of them would be lost; keep one')
    return found


def parse(text: bytes, pairs: Callable[[list[tuple[str, Any]]], Record] = once) -> Record:
    """Return the JSON object that `text` holds, without byte order mark and white space. Raise RecordError.

    `pairs` makes each object of its keys and values in order, of which one may be given twice.
    """
    if len(text) > MAX_RECORD_BYTES:
        raise too_long()
    try:
        value = json.loads(text.removeprefix(codecs.BOM_UTF8).decode().strip(), object_pairs_hook=pairs)
    except UnicodeDecodeError as error:
        raise RecordError(f"byte {error.start + 1} of the record is not UTF-8") from error
    except json.JSONDecodeError as error:
        line = f" of the record's line {error.lineno}" if error.lineno > 1 else ""
        raise RecordError(
            f"the record is not JSON: {error.msg.removesuffix(' at')} at character {error.colno}{line}"
        ) from error
    except RecordError:
        raise
    except (ValueError, RecursionError) as error:
        raise RecordError(f"the record is not JSON that can be read: {error}") from error
    if not isinstance(value, dict):
        remedy = "; write each sample on a line of its own" if isinstance(value, list) else ""
        raise RecordError(f"the record is a JSON {type(value).__name__}, not an object{remedy}")
    return value


def parsed(text: bytes) -> Record | RecordError:
    """Return what `parse` returns, or its error as a value."""
    try:
        return parse(text)
    except RecordError as error:
        return error


def too_long() -> RecordError:
    return RecordError(f"the record is longer than {MAX_RECORD_BYTES >> 20} MiB")
