"""The commands `note` and `tag`."""

from collections.abc import Sequence

import click

from autotune.cli.context import Options
from storage.annotation import Annotation, Subject
from storage.reading import read_store
from storage.store import Store
from trials import wire


def note(options: Options, name: str, text: str | None, *, is_removed: bool) -> None:
    """Set, remove or show the note of a study or plan."""
    if is_removed and text is not None:
        raise click.UsageError("give either a text or --remove")
    with read_store(options.database_url()) as store:
        subject = store.find_subject(name)
        if is_removed or text is not None:
            store.set_note(subject, text)
        found = _annotation(store, subject)
    _give(options, subject, found, found.note or f"{subject} has no note")


def tag(options: Options, name: str, added: Sequence[str], removed: Sequence[str]) -> None:
    """Add, remove or show the tags of a study or plan."""
    with read_store(options.database_url()) as store:
        subject = store.find_subject(name)
        found = store.change_tags(subject, added, removed) if added or removed else _annotation(store, subject)
    _give(options, subject, found, f"{subject}: {', '.join(found.tags) or 'no tags'}")


def _annotation(store: Store, subject: Subject) -> Annotation:
    return store.annotations(subject.kind, [subject.id]).get(subject.id, Annotation())


def _give(options: Options, subject: Subject, found: Annotation, text: str) -> None:
    options.give(lambda: {**wire.to_document(subject), **wire.to_document(found)}, lambda: text)
