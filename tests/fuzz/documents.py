"""Files as trees of JSON values, which are written back byte by byte, faults included."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from trials import strict_yaml

HEADER_BYTES = 8
"""Bytes of the length at the beginning of a safetensors file."""


class Raw(NamedTuple):
    """Literal text of the document, such as a number that no float can hold."""

    text: str


class Section(list[tuple[str, Any]]):
    """An object, which may give a key twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One tree of a file, and a function that writes the file with another tree in its place."""

    root: Any
    written: Callable[[Any], bytes]


def documents(name: str, content: bytes) -> list[Document]:
    """Return every tree in a file: one, or one for each line; none if it is neither JSON nor YAML."""
    if name.endswith(".jsonl"):
        return _of_lines(content.splitlines(keepends=True))
    try:
        if name.endswith(".safetensors"):
            return [_of_header(content)]
        if name.endswith(".yaml"):
            found = strict_yaml.read(content)  # which leaves aliases alone: some would be more than memory holds
            return [] if found.mistakes else [Document(root=_sections(found.value), written=_bytes)]
        if name.endswith(".json"):
            return [Document(root=_parsed(content.decode()), written=_bytes)]
    except (ValueError, RecursionError):
        pass  # an earlier mutation left it so
    return []


def text_of(node: Any) -> str:
    """Return JSON text, which may give a key twice and hold literal text."""
    match node:
        case Raw(text):
            return text
        case Section():
            return f"{{{', '.join(f'{json.dumps(key)}: {text_of(value)}' for key, value in node)}}}"
        case list():
            return f"[{', '.join(map(text_of, node))}]"
    return json.dumps(node, default=str)


def _of_lines(lines: list[bytes]) -> list[Document]:
    def written(number: int) -> Callable[[Any], bytes]:
        return lambda root: b"".join((*lines[:number], _bytes(root) + b"\n", *lines[number + 1 :]))

    roots = ((number, documents(".json", line)) for number, line in enumerate(lines))
    return [Document(root=found[0].root, written=written(number)) for number, found in roots if found]


def _of_header(content: bytes) -> Document:
    end = HEADER_BYTES + int.from_bytes(content[:HEADER_BYTES], "little")

    def written(root: Any) -> bytes:
        header = _bytes(root)
        return len(header).to_bytes(HEADER_BYTES, "little") + header + content[end:]

    return Document(root=_parsed(content[HEADER_BYTES:end].decode()), written=written)


def _parsed(text: str) -> Any:
    return json.loads(text, object_pairs_hook=Section)


def _sections(node: Any) -> Any:
    if isinstance(node, dict):
        return Section((str(key), _sections(value)) for key, value in node.items())
    return [_sections(value) for value in node] if isinstance(node, list) else node


def _bytes(root: Any) -> bytes:
    return text_of(root).encode(errors="surrogatepass")
