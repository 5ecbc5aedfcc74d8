"""Bundles: finished studies as self-describing JSON lines, for import into another database.

    {"format": "autotune-bundle", "version": 6, "source": "host: autotune.db", "exported": "2026-11-22T12:00:00+00:00"}
    {"table": "autotune_hardware", "row": {"fingerprint": "9504b3532fd465ff", "accelerator": "cuda", ...}}
    ...
    {"rows": 412, "sha256": "..."}

A row follows those that it refers to. The last line has the number of rows and the SHA-256 of all bytes before it.
Agents are left out: processes mean nothing on another machine.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from sqlalchemy import JSON, Column, Connection, Table, delete, exists, select, tuple_
from sqlalchemy.exc import DataError, IntegrityError

from storage.database import rows
from storage.database.rows import Row
from storage.database.tables import (
    ABANDONED,
    AGENT,
    BUNDLE,
    DELETED,
    FINISHED,
    LAYER_PROFILE,
    MODEL,
    NOTE,
    PLAN,
    PROVENANCE,
    RUNNING,
    STUDY,
    TAG,
    TRIAL,
    UtcDateTime,
)
from storage.errors import BadBundle
from storage.queries import exported, provenance
from storage.upkeep.health import problem_of, problems_of_studies, read
from trials.wire import WHOLE

FORMAT, VERSION = "autotune-bundle", 6
# A choice far above any stored row, since a line is in memory as a whole.
_MOST_OF_A_LINE = 32 << 20
# A choice: keys have up to six columns, so 3,000 values, of the 32,766 that SQLite allows in a statement.
_ROWS_AT_ONCE = 500
_SUBJECTS = STUDY, PLAN
"""What notes and tags are on."""
_HALF = re.compile("[\ud800-\udfff]")
"""Halves of surrogate pairs, which JSON can write but no database can store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Summary of an import."""

    source: str
    """Name of the database that exported the bundle."""
    new: int
    """Rows that were stored."""
    known: int
    """Rows that were stored already."""


def lines(connection: Connection, studies: Sequence[str], source: str) -> Iterator[str]:
    """Yield the lines of a bundle of finished studies. `source` names this database for readers."""
    header = {"format": FORMAT, "version": VERSION, "source": source, "exported": datetime.now(UTC).isoformat()}
    digest, count = hashlib.sha256(), 0
    documents = (
        {"table": table.name, "row": _document(table, row)}
        for table, query in exported.queries(studies).items()
        # In parts, so that a large database is never in memory as a whole.
        for row in connection.execute(query.execution_options(yield_per=_ROWS_AT_ONCE)).mappings()
    )
    for document in itertools.chain((header,), documents):
        line = f"{json.dumps(document)}\n"
        digest.update(line.encode())
        count += 1
        yield line
    yield f"{json.dumps({'rows': count - 1, 'sha256': digest.hexdigest()})}\n"


@contextmanager
def opened(path: Path) -> Iterator[Iterator[str]]:
    """Open the file of a bundle, which is read twice. Raise BadBundle if that is impossible."""
    try:
        if path.exists() and not path.is_file():
            raise BadBundle(f"{path} is not a regular file; name a file that `autotune db export` wrote")
        with path.open(encoding="utf-8", newline="\n") as text:
            yield _lines(text)
    except UnicodeDecodeError as error:
        raise BadBundle(f"{path} is no text; name a file that `autotune db export` wrote") from error
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        raise BadBundle(f"{path} {reason}; name a file that `autotune db export` wrote") from error


def _lines(text: TextIO) -> Iterator[str]:
    while line := text.readline(_MOST_OF_A_LINE + 1):
        if len(line) > _MOST_OF_A_LINE:
            raise BadBundle(f"the bundle has a line of more than {_MOST_OF_A_LINE >> 20} MiB; export it again")
        yield line


def check(text: Iterable[str]) -> str:
    """Return the digest of a bundle. Raise BadBundle unless it is complete, unchanged and of a known version.

    Only the first and the last line are parsed, and no more than two lines are in memory.
    """
    digest, count, before = hashlib.sha256(), 0, None
    for line in text:
        # One line late, since the last one holds the digest of the others.
        if before is not None:
            digest.update(before.encode())
        before, count = line, count + 1
        if count == 1:
            _check_header(_parsed(line, 1))
    if before is None:
        raise BadBundle("the bundle is empty; copy it again")
    end = _parsed(before, count)
    if end.keys() != {"rows", "sha256"}:
        raise BadBundle(f"the bundle ends in line {count} without its checksum: it is incomplete; copy it again")
    if end["sha256"] != digest.hexdigest():
        raise BadBundle("the bundle was changed since it was exported: its checksum differs; copy it again")
    if end["rows"] != count - 2:
        raise BadBundle(f"the bundle holds {count - 2} rows in place of {end['rows']}; export it again")
    return digest.hexdigest()


def take_in(connection: Connection, text: Iterable[str], digest: str) -> Imported:
    """Store the rows of a checked bundle that this database lacks. Raise BadBundle."""
    numbered = enumerate(text, 1)
    header = _parsed(next(numbered)[1], 1)
    bundle = {
        "digest": digest,
        "source": header["source"],
        "exported": _time(header["exported"]),
        "imported": datetime.now(UTC),
    }
    is_again = connection.scalar(select(exists().where(BUNDLE.c.digest == digest))) is True
    rows.ensure(connection, BUNDLE, bundle)
    count, fresh = _stored(connection, numbered, digest, is_again=is_again)
    for table, keys in fresh.items():
        # As the database returns them, since it may convert what it stores.
        for row in _read(connection, table, keys):
            if (what := problem_of(table, row)) is not None:
                name = rows.text_of(rows.key_of(table, row))
                raise BadBundle(f"the bundle's {table.name} {name} {what}; export it again")
    if found := list(problems_of_studies(connection, [key for (key,) in fresh[STUDY]])):
        raise BadBundle(f"the bundle is incomplete: {found[0]}; export it again")
    new = sum(map(len, fresh.values()))
    return Imported(source=header["source"], new=new, known=count - new)


def _read(connection: Connection, table: Table, keys: Sequence[tuple[Any, ...]]) -> Iterator[Row]:
    """Read the rows back from the database."""
    for first in range(0, len(keys), _ROWS_AT_ONCE):
        some = keys[first : first + _ROWS_AT_ONCE]
        yield from read(connection, table, rows.whole(table).where(tuple_(*table.primary_key).in_(some)))


class _Line(NamedTuple):
    number: int
    key: tuple[Any, ...]
    """Primary key of the row."""
    row: dict[str, Any]


def _stored(
    connection: Connection, numbered: Iterable[tuple[int, str]], digest: str, *, is_again: bool
) -> tuple[int, dict[Table, list[tuple[Any, ...]]]]:
    """Store the rows, and return (number of rows in the bundle, primary keys of the new ones)."""
    count, fresh = 0, {table: list[tuple[Any, ...]]() for table in exported.TABLES}
    for table, lines in _batches(numbered):
        count += len(lines)
        new = _merged(connection, table, _unremoved(table, lines, fresh) if is_again else lines)
        keys = [line.key for line in new]
        texts = list(map(rows.text_of, keys))
        provenance.forget(connection, table, keys)  # of rows that were lost
        connection.execute(delete(DELETED).where(DELETED.c.kind == table.name, DELETED.c.key.in_(texts)))
        origins = [{"kind": table.name, "key": text, "bundle_digest": digest} for text in texts]
        rows.add(connection, PROVENANCE, origins)
        fresh[table] += keys
    return count, fresh


def _unremoved(
    table: Table, lines: Sequence[_Line], fresh: Mapping[Table, Sequence[tuple[Any, ...]]]
) -> Sequence[_Line]:
    """Return the rows of a bundle that was imported before, without notes and tags of studies and plans that stayed.

    Those that are missing were removed here.
    """
    if table not in (NOTE, TAG):
        return lines
    restored = {(subject.name, key) for subject in _SUBJECTS for (key,) in fresh[subject]}
    return [line for line in lines if _subject(line) in restored]


def _batches(numbered: Iterable[tuple[int, str]]) -> Iterator[tuple[Table, list[_Line]]]:
    """Yield the rows of the bundle in its order, in batches of one table that a few statements store."""
    for table, lines in itertools.groupby(_decoded(numbered), key=itemgetter(0)):
        while some := [line for _, line in itertools.islice(lines, _ROWS_AT_ONCE)]:
            yield table, some


def _decoded(numbered: Iterable[tuple[int, str]]) -> Iterator[tuple[Table, _Line]]:
    tables = {table.name: table for table in exported.TABLES}
    for number, text in numbered:
        document = _parsed(text, number)
        if "sha256" in document:
            break
        table = tables.get(str(document.get("table")))
        if table is None:
            raise BadBundle(f"line {number} of the bundle names no table that can be imported; export it again")
        row = _row(table, document.get("row"), number)
        yield table, _Line(number, tuple(row[column.name] for column in table.primary_key), row)


def _merged(connection: Connection, table: Table, lines: Sequence[_Line]) -> list[_Line]:
    """Add the new rows, and return them. A stored row stays, except a trial whose end only the bundle knows."""
    known = select(table).where(tuple_(*table.primary_key).in_([line.key for line in lines]))
    stored: dict[tuple[Any, ...], Row] = {rows.key_of(table, row): row for row in connection.execute(known).mappings()}
    new = [line for line in lines if line.key not in stored]
    if table in (NOTE, TAG):
        _check_subjects(connection, new)
    # Versions that lack a column leave it out, and a statement adds rows with the same columns.
    for _, alike in itertools.groupby(new, key=lambda line: line.row.keys()):
        _add(connection, table, list(alike))
    for line in lines:
        if line.key in stored:
            _compare(connection, table, stored[line.key], line)
    return new


def _add(connection: Connection, table: Table, lines: Sequence[_Line]) -> None:
    try:
        rows.add(connection, table, [line.row for line in lines])
    except (IntegrityError, DataError) as error:
        raise BadBundle(
            f"one of lines {lines[0].number} to {lines[-1].number} of the bundle, of {table.name}, refers to a row "
            "that is missing, contradicts one that is stored, or holds a value that cannot be stored; export it again"
        ) from error


def _compare(connection: Connection, table: Table, stored: Row, line: _Line) -> None:
    """Take the end of a trial over. Raise BadBundle for a row that contradicts the one that is stored."""
    if table is TRIAL and stored["status"] != line.row["status"]:
        if line.row["status"] == FINISHED:
            end = {name: line.row.get(name) for name in ("status", "finished", "given_up")}
            rows.change(connection, TRIAL, line.row["id"], **end)
    elif _differs(table, stored, line.row):
        raise BadBundle(
            f"line {line.number} of the bundle contradicts the {table.name} {rows.text_of(line.key)} that is stored; "
            "what is stored stays"
        )


def _subject(line: _Line) -> tuple[str, str]:
    """Return (table, key) of what a note or tag is on."""
    return line.row["kind"], line.row["key"]


def _check_subjects(connection: Connection, lines: Sequence[_Line]) -> None:
    """Raise BadBundle unless notes and tags are on stored studies and plans."""
    keys = [line.row["key"] for line in lines]
    found = {
        (table.name, key)
        for table in _SUBJECTS
        for key in connection.scalars(select(table.c.id).where(table.c.id.in_(keys)))
    }
    for line in lines:
        if _subject(line) not in found:
            raise BadBundle(f"line {line.number} of the bundle annotates a row that is missing; export it again")


def _differs(table: Table, stored: Row, row: Row) -> bool:
    """Return whether the two rows contradict each other in a column that the bundle has.

    Layer profiles and notes are replaced in the course of time.
    """
    if table in (LAYER_PROFILE, NOTE):
        return False
    ours, theirs = _document(table, stored), _document(table, row)
    names = {name for name in theirs if ours[name] != theirs[name]}
    return bool(names - {"name"} if table is MODEL else names)


def _document(table: Table, row: Row) -> dict[str, Any]:
    """Return the row as JSON values, without columns for this database alone; a running trial counts as abandoned.

    When a trial was abandoned is left out, too: a later bundle of one that ran would contradict an earlier one.
    """
    values = {name: value for name, value in row.items() if not _is_local(table.c[name])}
    if table is TRIAL and row["status"] in (RUNNING, ABANDONED):
        values |= {"status": ABANDONED, "finished": row["started"]}
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in values.items()}


def _row(table: Table, document: Any, number: int) -> dict[str, Any]:
    columns = {column.name: column for column in table.columns if not _is_local(column)}
    later = {name for name, column in columns.items() if column.nullable or column.server_default is not None}
    document = document if isinstance(document, dict) else {}
    if not columns.keys() - later <= document.keys() <= columns.keys():
        names = set(columns).symmetric_difference(document)
        raise BadBundle(
            f"line {number} of the bundle does not have the columns of {table.name}: "
            f"{', '.join(sorted(names)) or 'none'}; export it again with this version"
        )
    return {name: _value(columns[name], value, number) for name, value in document.items()}


def _value(column: Column[Any], value: Any, number: int) -> Any:
    if value is None and column.nullable:
        return None
    if isinstance(column.type, UtcDateTime):
        return _time(value)
    if isinstance(column.type, JSON):
        return value
    wanted = column.type.python_type
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise BadBundle(f"line {number} of the bundle: {column.name} is no {wanted.__name__}; export it again")
    if isinstance(value, str) and _HALF.search(value):
        raise BadBundle(f"line {number} of the bundle: {column.name} holds half of a character; export it again")
    if wanted is int and value not in WHOLE:
        raise BadBundle(
            f"line {number} of the bundle: {column.name} is {value}, which cannot be stored; export it again"
        )
    return value


def _is_local(column: Column[Any]) -> bool:
    """Return whether the column concerns this database alone: agents, and what is archived here."""
    return column is STUDY.c.archived or any(key.column.table.name == AGENT.name for key in column.foreign_keys)


def _time(value: Any) -> datetime:
    try:
        time = datetime.fromisoformat(value)
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    except (TypeError, ValueError, OverflowError):
        raise BadBundle(f"the bundle has {value!r} for a time; export it again") from None


def _check_header(header: dict[str, Any]) -> None:
    if header.get("format") != FORMAT:
        raise BadBundle(f"this is no file that `autotune db export` wrote; its first line is not of an {FORMAT}")
    if header.get("version") != VERSION:
        raise BadBundle(
            f"the bundle has version {header.get('version')!r}, this software reads {VERSION}; export it again with "
            "the same version of vlm-autotune"
        )
    if not isinstance(header.get("source"), str):
        raise BadBundle("the bundle does not say where it comes from; export it again")
    _time(header.get("exported"))


def _parsed(line: str, number: int) -> dict[str, Any]:
    try:
        document = json.loads(line)
        json.dumps(document, allow_nan=False)  # what is not finite is no JSON either
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise BadBundle(
            f"line {number} of the bundle is no JSON object: it is incomplete or not a bundle; copy it again"
        )
    return document
