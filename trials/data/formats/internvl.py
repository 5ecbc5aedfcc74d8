"""InternVL's formats: JSON Lines of conversations, and the meta JSON that lists such files with their repeats.

Source: internvl.readthedocs.io, "Chat Data Format", and InternVL's training code where that page is silent.
"""

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from trials.data import jsonl
from trials.data.formats import AnnotationFile
from trials.data.jsonl import LineError, Place
from trials.data.sample import IMAGE, BadLine, Sample, Turn
from trials.errors import DataError

_ROLES: dict[str, Literal["system", "user", "assistant"]] = {"human": "user", "gpt": "assistant", "system": "system"}
_LOOKED_AT = 64
"""Lines that are tried before a file is said to be in another format."""
_MOST_REPEATS = 1000

logger = logging.getLogger(__name__)


def recognises(path: Path) -> bool:
    """Whether it is a meta file, or one of its first lines is a conversation of `from` and `value`."""
    return _meta(path) is not None or any(_is_conversation(line) for _, line in islice(jsonl.lines(path), _LOOKED_AT))


def files(source: AnnotationFile) -> Iterator[AnnotationFile]:
    """The source itself, or the files of a meta file; their paths are relative to the meta file's folder."""
    meta = _meta(source.path)
    if meta is None:
        yield source
        return
    for name, entry in meta.items():
        yield _listed(source, name, entry)


def records(file: AnnotationFile) -> Iterator[tuple[Place, Sample | BadLine]]:
    """Every line that is not blank."""
    for place, line in jsonl.lines(file.path):
        yield place, _record(file, place, line)


def read(file: AnnotationFile, place: Place) -> Sample | BadLine:
    """The record at this place."""
    return _record(file, place, jsonl.line_at(file.path, place[0]))


def _record(file: AnnotationFile, place: Place, line: bytes) -> Sample | BadLine:
    try:
        return _sample(jsonl.parse(line), file.images)
    except LineError as error:
        return BadLine(path=file.path, line=place[1], reason=str(error))


def _is_conversation(line: bytes) -> bool:
    try:
        match jsonl.parse(line):
            case {"conversations": [{"from": str()}, *_]}:
                return True
    except LineError:
        pass
    return False


# --- meta file ---


def _meta(path: Path) -> dict[str, dict[str, Any]] | None:
    """The entries of a meta file by name; None when the file is anything else."""
    with jsonl.open_annotations(path) as stream:
        text = stream.read(jsonl.MAX_LINE_BYTES)
    try:
        value = jsonl.parse(text)
    except LineError:
        return None
    entries = value.values()
    return value if value and all(isinstance(entry, dict) and "annotation" in entry for entry in entries) else None


def _listed(source: AnnotationFile, name: str, entry: dict[str, Any]) -> AnnotationFile:
    where = f"{source.path}: {json.dumps(name)}"
    folder = source.path.parent
    for key in ("annotation", "root"):
        if not isinstance(entry.get(key, ""), str):
            raise DataError(
                f"{where}: `{key}` is {entry[key]!r}; write a path relative to the meta file, or an absolute one"
            )
    repeat = entry.get("repeat_time", 1)
    if isinstance(repeat, bool) or not isinstance(repeat, int | float) or not 0 < repeat <= _MOST_REPEATS:
        raise DataError(f"{where}: `repeat_time` is {repeat!r}; write a number above 0, at most {_MOST_REPEATS}")
    if "max_dynamic_patch" in entry:
        logger.warning("%s: max_dynamic_patch is ignored; the model's own image processor sets the tiles", where)
    images = folder / entry.get("root", "")
    return replace(source, path=folder / entry["annotation"], images=images, repeat=source.repeat * repeat)


# --- one record ---


@dataclass(frozen=True, slots=True, kw_only=True)
class _Images:
    paths: tuple[Path, ...]
    sizes: tuple[tuple[int, int] | None, ...]


def _sample(record: dict[str, Any], root: Path) -> Sample:
    if record.get("video"):
        raise LineError("`video` is not supported; give its frames as a list under `image`")
    images = _images(record, root)
    turns = _with_placeholder(_turns(record), len(images.paths))
    placeholders = sum(turn.text.count(IMAGE) for turn in turns if turn.role == "user")
    if placeholders != len(images.paths):
        raise LineError(f"the human turns hold {placeholders} {IMAGE} but the record names {len(images.paths)} images")
    return Sample(turns=turns, images=images.paths, image_sizes=images.sizes)


def _turns(record: dict[str, Any]) -> tuple[Turn, ...]:
    conversations = record.get("conversations")
    if not isinstance(conversations, list):
        fault = "is not a list" if "conversations" in record else "is missing"
        raise LineError(f"`conversations` {fault}; the record has {', '.join(record) or 'no keys'}")
    if not conversations:
        raise LineError("`conversations` is empty")
    return tuple(_turn(turn, number) for number, turn in enumerate(conversations, 1))


def _turn(turn: object, number: int) -> Turn:
    if not isinstance(turn, dict):
        raise LineError(f"turn {number} is not an object with `from` and `value`")
    speaker = turn.get("from")
    if not isinstance(speaker, str) or speaker not in _ROLES:
        raise LineError(f"turn {number} is from {speaker!r}; expected human, gpt or system")
    value = turn.get("value")
    if not isinstance(value, str):
        slip = "; it has `text`, rename that to `value`" if "text" in turn and value is None else ""
        raise LineError(f"turn {number} has no text under `value`{slip}")
    if not _is_unicode(value):
        raise LineError(f"turn {number} holds half of a surrogate pair, which is no character")
    return Turn(role=_ROLES[speaker], text=value)


def _with_placeholder(turns: tuple[Turn, ...], images: int) -> tuple[Turn, ...]:
    """InternVL shows a single image that no turn mentions at the start of the first human turn."""
    first = next((number for number, turn in enumerate(turns) if turn.role == "user"), None)
    if images != 1 or first is None or any(IMAGE in turn.text for turn in turns if turn.role == "user"):
        return turns
    shown = replace(turns[first], text=f"{IMAGE}\n{turns[first].text}")
    return (*turns[:first], shown, *turns[first + 1 :])


def _images(record: dict[str, Any], root: Path) -> _Images:
    """An absent or empty `image` is a sample of text alone, as in InternVL's loader."""
    names = record.get("image", [])
    if isinstance(names, str):
        names = [names] if names else []
        sizes = [(record.get("height"), record.get("width"))]
    elif isinstance(names, list):
        sizes = list(zip(_list(record, "height_list"), _list(record, "width_list"), strict=False))
    else:
        raise LineError(f"`image` is {json.dumps(names)[:40]}; expected a name, a list of names, or no such key")
    if not all(isinstance(name, str) and name and "\0" not in name and _is_unicode(name) for name in names):
        raise LineError("`image` holds something that is no file name")
    stated = (*(_size(*size) for size in sizes), *(None for _ in names))
    return _Images(paths=tuple(root / name for name in names), sizes=stated[: len(names)])


def _list(record: dict[str, Any], key: str) -> list[Any]:
    value = record.get(key)
    return value if isinstance(value, list) else []


def _size(height: object, width: object) -> tuple[int, int] | None:
    """A stated size is a hint, so nonsense counts as nothing said."""
    if isinstance(height, int) and isinstance(width, int) and height > 0 and width > 0:
        return height, width
    return None


def _is_unicode(text: str) -> bool:
    """False for half of a surrogate pair, which JSON can hold and no tokenizer or file system takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
