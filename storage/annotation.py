"""What users add to a study or a plan: a note and tags."""

import unicodedata
from dataclasses import dataclass
from typing import Literal

from storage.errors import BadAnnotation

# Choices: lists of studies show all tags, and the beginning of the note.
MOST_TAGS = 32
_MOST_OF_A_NOTE, _MOST_OF_A_TAG = 4000, 64
"""Characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A stored study or plan that can have a note and tags."""

    kind: Literal["study", "plan"]
    id: str
    name: str
    """Name in messages; for a plan its id."""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """Note and tags of one study or plan."""

    note: str | None = None
    tags: tuple[str, ...] = ()
    """Sorted."""


def checked_note(note: str) -> str:
    """Return the note without space around it. Raise BadAnnotation unless it is text of a suitable length."""
    text = note.strip()
    _check_text("a note", text, _MOST_OF_A_NOTE)
    if "\0" in text:
        raise BadAnnotation("a note has no NUL characters; leave them out")
    return text


def stored_tag(tag: str) -> str:
    """Return the tag without space around it, in Unicode's composed form, so that tags that look equal are equal."""
    return unicodedata.normalize("NFC", tag.strip())


def checked_tag(tag: str) -> str:
    """Return the tag as it is stored.

    Raise BadAnnotation unless it is one line of printable text without commas, which separate tags.
    """
    text = stored_tag(tag)
    _check_text("a tag", text, _MOST_OF_A_TAG)
    if not text.isprintable() or "," in text:
        raise BadAnnotation(f"{tag!r} is not a tag; write printable characters without commas")
    return text


def _check_text(what: str, text: str, most: int) -> None:
    if not text:
        raise BadAnnotation(f"{what} needs at least one character; --remove removes it")
    if len(text) > most:
        raise BadAnnotation(f"{what} has at most {most} characters, not {len(text)}; shorten it")
    if not text.isascii() and any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        raise BadAnnotation(f"{what} is Unicode text, and {text[:40]!r} has bytes or halves of characters; write UTF-8")
