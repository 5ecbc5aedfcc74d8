"""One JSON list that fills a file: one element a record.

Text is searched as Latin-1, in which a byte is a character, so that positions in it are positions in the file. The end
of an element is found by decoding it. Behind a fault the next line goes on that begins like the first element's: JSON
holds no line feed inside a text, so that line begins an object, whatever stands before it.
"""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import IO

from trials.data.records import record
from trials.data.records.file_chunk import CHUNK_BYTES, Chunk, Place, digest, grouped, open_annotations
from trials.data.records.record import Record, RecordError, parse, parsed, too_long
from trials.errors import DataError

__all__ = ["chunks", "digest", "read", "records"]

_OPENING = re.compile(r"(?:\xef\xbb\xbf)?[ \t\r\n]*\[([ \t\r\n]*)")
_SPACE = re.compile(r"[ \t\r\n]*")
_BETWEEN = re.compile(r"[ \t\r\n]*,?[ \t\r\n]*")
_OWN_LINE = re.compile(rb"\n\][ \t\r\n]*\Z")
_BEHIND = re.compile(r"[ \t\r\n]*[,\]]")
# A choice: a reader may begin at any element, and reads at least this much for it.
BLOCK_BYTES = 64 << 10
# Longer than a word or an escape of JSON (`-Infinity`, `\ud83d\ude00`), which the end of the text may cut.
_LONGEST_TOKEN = 16
_DECODER = json.JSONDecoder(strict=False, parse_int=len, parse_float=len)
"""Finds the ends of elements, and accepts what `parse` refuses later in one record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Begin and end of an element."""

    begin: Place
    end: int
    fault: str | None = None
    """Why the elements behind this one cannot be found, None if they can."""


def chunks(path: Path) -> Iterator[Chunk]:
    """Yield the chunks. Raise DataError for a file that was cut off, and for a fault behind which nothing is found."""
    start, separator = _opening(path)
    return grouped(start, _ends(path, start, separator))


def records(path: Path, chunk: Chunk) -> Iterator[tuple[Place, Record | RecordError]]:
    """Yield every element."""
    if chunk.end - chunk.start > CHUNK_BYTES + record.MAX_RECORD_BYTES:
        yield (chunk.start, chunk.line), too_long()
        return
    with open_annotations(path) as stream:
        stream.seek(chunk.start)
        data = stream.read(chunk.end - chunk.start)
    for span in _spans(_Window(BytesIO(data), (chunk.start, chunk.line)), _opening(path)[1]):
        yield span.begin, parsed(data[span.begin[0] - chunk.start : span.end - chunk.start])


def read(path: Path, place: Place) -> Record:
    """Return the record at this place. Raise RecordError."""
    with open_annotations(path) as stream:
        stream.seek(place[0])
        window = _Window(stream, place)
        behind = window.behind()
    if behind is None:
        raise RecordError("no element of the list can be read here")
    return parse(window.text[: behind.start()].encode("latin-1"))


def _opening(path: Path) -> tuple[Place, str | None]:
    """Return where the first element begins, and what precedes the others; None where they have no own lines."""
    with open_annotations(path) as stream:
        opening = _OPENING.match(stream.read(BLOCK_BYTES).decode("latin-1"))
    if opening is None:
        raise DataError(f"annotation file {path} has changed: it is no JSON list any more; index it again")
    _, line_feed, indent = opening[1].rpartition("\n")
    return (opening.end(), 1 + opening[0].count("\n")), f"\n{indent}{{" if line_feed else None


def _ends(path: Path, start: Place, separator: str | None) -> Iterator[Place]:
    """Yield where each element's successor begins, and at last where the file ends."""
    with open_annotations(path) as stream:
        stream.seek(start[0])
        window = _Window(stream, start)
        for number, span in enumerate(_spans(window, separator)):
            if span.fault:
                raise DataError(
                    f"{path}:{span.begin[1]}: {span.fault}; nothing after byte {span.begin[0]} can be read, because "
                    "the records are not on separate lines; correct the file, or write it as JSON Lines"
                )
            if number:
                yield span.begin
        end = stream.seek(0, SEEK_END)
        stream.seek(max(start[0], end - BLOCK_BYTES))
        # Behind a faulty record, a bracket may be one of its own, unless it has a line to itself.
        if not (window.is_at_end() or (separator and _OWN_LINE.search(stream.read()))):
            raise DataError(
                f"annotation file {path}: the JSON list has no end behind its last record, so the file was cut off "
                "and samples may be missing; write or copy it again"
            )
        yield end, window.line


def _spans(window: "_Window", separator: str | None) -> Iterator[_Span]:
    """Yield every element from the window on; a faulty one ends before the next with a line of its own."""
    while not window.is_finished():
        behind = window.behind()
        begin = window.place()
        if behind:
            window.move(behind.start())
            yield _Span(begin=begin, end=window.place()[0])
        else:
            fault = window.fault() if separator is None else None
            window.skip_to(separator)
            yield _Span(begin=begin, end=window.place()[0], fault=fault)


class _Window:
    """The part of a file that is looked at."""

    def __init__(self, stream: IO[bytes], start: Place) -> None:
        self._stream = stream
        self._position, self.line = start
        self.text = ""
        self.at = 0
        """Position in the text that `line` belongs to; what lies before it can be forgotten."""

    def place(self) -> Place:
        return self._position + self.at, self.line

    def move(self, to: int) -> None:
        self.line += self.text.count("\n", self.at, to)
        self.at = to

    def is_finished(self) -> bool:
        """Move behind white space and a comma; return whether the list or the file ends there."""
        while (to := _end(_BETWEEN, self.text, self.at)) == len(self.text):
            self.move(to)
            if not self._more():
                return True
        self.move(to)
        return self.text[to] == "]" and self._is_blank(to + 1)

    def is_at_end(self) -> bool:
        """Return whether `is_finished` found the end of the list, and not only that of the file."""
        return self.text[self.at : self.at + 1] == "]"

    def behind(self) -> re.Match[str] | None:
        """Match the comma or bracket behind the element that begins here; None for a faulty element."""
        while True:
            behind = None
            with suppress(ValueError, RecursionError):
                _, end = _DECODER.raw_decode(self.text, self.at)
                behind = _BEHIND.match(self.text, end)
            if behind or self._is_hopeless() or not self._more():
                return behind

    def fault(self) -> str | None:
        """Return what is wrong with the element that begins here; None when the file was only cut off."""
        if not self._is_hopeless():
            return None
        found = parsed(self.text[self.at :].encode("latin-1"))
        return str(found if isinstance(found, RecordError) else "no comma stands behind the record")

    def skip_to(self, separator: str | None) -> None:
        """Move to the line that begins with `separator`, or to the end of the file, in bounded memory."""
        while (found := self.text.find(separator, self.at) if separator else -1) < 0:
            self.move(max(self.at, len(self.text) - len(separator or "")))
            if not self._more():
                self.move(len(self.text))
                return
        self.move(found + 1)

    def _is_blank(self, start: int) -> bool:
        """Return whether only white space follows; `at` stays."""
        while _end(_SPACE, self.text, start) == len(self.text):
            # `_more` drops the text before `at`, so that positions move.
            start -= self.at
            if not self._more():
                return True
        return False

    def _is_hopeless(self) -> bool:
        """Return whether no further text can make an element of what begins here."""
        if len(self.text) - self.at > record.MAX_RECORD_BYTES:
            return True
        try:
            _, end = _DECODER.raw_decode(self.text, self.at)
        except json.JSONDecodeError as error:
            return not error.msg.startswith("Unterminated") and error.pos + _LONGEST_TOKEN < len(self.text)
        except (ValueError, RecursionError):
            return True
        return _end(_SPACE, self.text, end) < len(self.text)

    def _more(self) -> bool:
        kept = len(self.text) - self.at
        block = self._stream.read(max(BLOCK_BYTES, min(kept, record.MAX_RECORD_BYTES - kept)))
        self._position += self.at
        self.text = self.text[self.at :] + block.decode("latin-1")
        self.at = 0
        return bool(block)


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    """End of the match at `start` of a pattern that matches nothing, too."""
    match = pattern.match(text, start)
    return match.end() if match else start
