"""Strict YAML: no ambiguous scalars, no lost values, and the line of every value.

Plain scalars follow YAML 1.2, so that `1e-5` is a number while `no` and `12:30` stay texts. Keys that are given twice,
tags and aliases are mistakes: the first loses a value silently, the others have no use in a file written by hand.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import yaml

Place: TypeAlias = tuple[str | int, ...]
"""Keys and list positions from the top of the file down to a value."""

_UNTAGGED = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_WHOLE = re.compile(r"[-+]?\d{1,18}")
# A choice: job files nest two or three deep, and Python's recursion ends at 1,000 frames, several for each bracket.
_MOST_BRACKETS = 100
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """One thing that is wrong, and what to do about it."""

    line: int
    """Line of the file, counted from 1; 0 for a value that does not come from it."""
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}"


class NotYaml(ValueError):
    """The text is not valid YAML, so it cannot be checked further."""

    def __init__(self, mistake: Mistake) -> None:
        super().__init__(str(mistake))
        self.mistake = mistake


@dataclass(slots=True, kw_only=True)
class Document:
    """The value of a file, the lines of its parts, and the mistakes in its form."""

    value: object = None
    lines: dict[Place, int] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def line(self, place: Place) -> int:
        """Return the line of the value at `place`, or of the innermost part around it that exists."""
        while place and place not in self.lines:
            place = place[:-1]
        return self.lines.get(place, 1)


def dotted(place: Place) -> str:
    """Return the place as messages write it, such as `data.sources[0].path`."""
    keys = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return keys.removeprefix(".") or "the file"


def read(text: bytes) -> Document:
    """Return the one document of `text`. Raise NotYaml."""
    try:
        root = yaml.compose(text, Loader=_Loader)
        document = Document()
        if root is not None:
            document.value = _Builder(document).value(root, ())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        what = ", ".join(filter(None, (error.context, error.problem)))
        raise NotYaml(Mistake(line=line, text=f"{what}; {_remedy(error.problem or '')}")) from error
    except yaml.reader.ReaderError as error:
        line = text.count(b"\n", 0, error.position) + 1
        raise NotYaml(Mistake(line=line, text=f"not a text file in UTF-8: {error.reason}")) from error
    except RecursionError as error:
        raise NotYaml(Mistake(line=1, text="lists or sections are nested too deeply")) from error
    return document


def _remedy(problem: str) -> str:
    if r"'\t'" in problem:
        return "YAML is indented by spaces alone: replace the tabs"
    return "check indentation, colons, brackets and quotes there and in the line before"


class _Loader(yaml.BaseLoader):
    """Loader that refuses deep brackets where it reads them: the scanner's time for a token grows with their number."""

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        if self.flow_level == _MOST_BRACKETS:
            raise yaml.scanner.ScannerError(
                problem="lists or sections are nested too deeply", problem_mark=self.get_mark()
            )
        super().fetch_flow_collection_start(token)


class _Builder:
    """Converter of nodes to values: texts, numbers, booleans, lists and dictionaries only."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._seen: set[int] = set()

    def value(self, node: yaml.Node, place: Place) -> object:
        line = node.start_mark.line + 1
        self._document.lines[place] = line
        # An alias comes as the node of its anchor once more.
        if id(node) in self._seen:
            self._refuse(line, f"{dotted(place)}: repeats this value by an alias (*); write the value out")
            return None
        self._seen.add(id(node))
        if node.tag not in _UNTAGGED:
            self._refuse(line, f"{dotted(place)}: the tag {node.tag!r} is refused; write a plain value")
            return None
        if isinstance(node, yaml.MappingNode):
            return {key: self.value(child, (*place, key)) for key, child in self._entries(node, place)}
        if isinstance(node, yaml.SequenceNode):
            return [self.value(child, (*place, number)) for number, child in enumerate(node.value)]
        if "\0" in node.value:  # the system's calls raise ValueError for such a path
            self._refuse(line, f"{dotted(place)}: holds a null character (\\0); remove it")
        # Quotes make a text of whatever stands in them.
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        return _plain(node.value) if plain else node.value

    def _entries(self, node: yaml.MappingNode, place: Place) -> Iterator[tuple[str, yaml.Node]]:
        first: dict[str, int] = {}
        for key, child in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                self._refuse(line, f"{dotted(place)}: a key must be a single word")
            elif key.value in first:
                where = dotted((*place, key.value))
                self._refuse(line, f"{where}: given twice, first on line {first[key.value]}; keep one")
            else:
                first[key.value] = line
                yield key.value, child

    def _refuse(self, line: int, text: str) -> None:
        self._document.mistakes.append(Mistake(line=line, text=text))


def _plain(text: str) -> object:
    """Return the value of an unquoted scalar; a number that is too large stays a text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _WHOLE.fullmatch(text):
        return int(text)
    if _NUMBER.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text
