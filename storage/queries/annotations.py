"""Notes and tags of studies and plans."""

from collections.abc import Collection, Mapping
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Table, delete, exists, insert, select

from storage.annotation import MOST_TAGS, Annotation, Subject, stored_tag
from storage.database import rows
from storage.database.tables import NOTE, PLAN, STUDY, TAG
from storage.errors import BadAnnotation
from storage.queries import provenance

TABLES: Mapping[str, Table] = {"study": STUDY, "plan": PLAN}
"""By the kind of a subject."""


def has_tag(table: Table, key: Column[Any], tag: str) -> ColumnElement[bool]:
    """Return the condition that the row of the table with this key has the tag."""
    return exists(select(TAG.c.key).where(TAG.c.kind == table.name, TAG.c.key == key, TAG.c.tag == stored_tag(tag)))


def of(connection: Connection, kind: str, ids: Collection[str] | None = None) -> Mapping[str, Annotation]:
    """Return notes and tags by id, of all subjects of `kind` (`study` or `plan`) that have any, or of `ids`."""
    notes, tags = dict[str, str](), dict[str, list[str]]()
    for table in (NOTE, TAG):
        query = select(table).where(table.c.kind == TABLES[kind].name)
        query = query if ids is None else query.where(table.c.key.in_(ids))
        for row in connection.execute(query).mappings():
            if table is NOTE:
                notes[row["key"]] = row["text"]
            else:
                tags.setdefault(row["key"], []).append(row["tag"])
    return {
        key: Annotation(note=notes.get(key), tags=tuple(sorted(tags.get(key, ()))))
        for key in notes.keys() | tags.keys()
    }


def set_note(connection: Connection, subject: Subject, note: str | None) -> None:
    key = _locked(connection, subject)
    _remove(connection, NOTE, key)
    if note is not None:
        connection.execute(insert(NOTE).values(kind=key[0], key=key[1], text=note))


def change_tags(
    connection: Connection, subject: Subject, added: Collection[str], removed: Collection[str]
) -> Annotation:
    key = _locked(connection, subject)
    before = of(connection, subject.kind, [subject.id]).get(subject.id, Annotation())
    if missing := sorted(set(removed) - set(before.tags)):
        has = ", ".join(before.tags) or "none"
        raise BadAnnotation(f"{subject} has no tag {', '.join(map(repr, missing))}; its tags are: {has}")
    tags = (set(before.tags) - set(removed)) | set(added)
    new = tags - set(before.tags)
    if new and len(tags) > MOST_TAGS:  # without new ones there may be more, which an import has brought
        raise BadAnnotation(f"{subject} would have {len(tags)} tags, at most {MOST_TAGS} are kept; remove some")
    for tag in set(before.tags) - tags:
        _remove(connection, TAG, (*key, tag))
    rows.add(connection, TAG, [{"kind": key[0], "key": key[1], "tag": tag} for tag in sorted(new)])
    return Annotation(note=before.note, tags=tuple(sorted(tags)))


def _locked(connection: Connection, subject: Subject) -> tuple[str, str]:
    """Return the key of the subject's annotations, and keep others from changing them until the transaction ends."""
    table = TABLES[subject.kind]
    rows.get(connection, table, subject.id, lock=True)
    return table.name, subject.id


def _remove(connection: Connection, table: Table, key: tuple[str, ...]) -> None:
    provenance.forget(connection, table, [key])
    connection.execute(delete(table).where(rows.has_key(table, key)))
