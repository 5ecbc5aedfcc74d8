"""Bundles: finished studies as self-describing JSON lines, for import into another database.

    {"format": "autotune-bundle", "version": 2, "source": "host: autotune.db", "exported": "2026-11-22T12:00:00+00:00"}
    {"table": "autotune_hardware", "row": {"fingerprint": "9504b3532fd465ff", "accelerator": "cuda", ...}}
    ...
    {"rows": 412, "sha256": "..."}

A row follows those that it refers to. The last line has the number of rows and the SHA-256 of all bytes before it.
Agents are left out: processes mean nothing on another machine.
"""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from sqlalchemy import JSON, Column, Select, inspect, select, tuple_, union
from sqlalchemy.exc import DataError, IntegrityError
from sqlalchemy.orm import Session

from storage.database.tables import (
    ABANDONED,
    FINISHED,
    RUNNING,
    AgentRow,
    AttemptRow,
    Base,
    BestPlanRow,
    BundleRow,
    DataProfileRow,
    HardwareRow,
    LaunchRow,
    LayerProfileRow,
    ModelRow,
    OutcomeRow,
    PlanRow,
    ProvenanceRow,
    StageMeasurementRow,
    StudyRow,
    TrialRow,
    UtcDateTime,
    WorkloadRow,
)
from storage.errors import BadBundle
from storage.old_keys import OldKeys
from storage.queries import codec, provenance
from storage.upkeep.health import problem_of, problems_of_studies
from trials.wire import WHOLE
from trials.workload import PATH_DIGEST

FORMAT, VERSION, READABLE = "autotune-bundle", 2, (1, 2)
_KINDS: tuple[type[Base], ...] = (
    HardwareRow,
    ModelRow,
    DataProfileRow,
    WorkloadRow,
    LayerProfileRow,
    PlanRow,
    StudyRow,
    TrialRow,
    OutcomeRow,
    AttemptRow,
    StageMeasurementRow,
    BestPlanRow,
    LaunchRow,
)
"""Tables in an order in which rows follow those that they refer to."""
_MOST_OF_A_LINE = 32 << 20
_ROWS_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """Summary of an import."""

    source: str
    """Name of the database that exported the bundle."""
    new: int
    """Rows that were stored."""
    known: int
    """Rows that were stored already."""


def lines(session: Session, studies: Sequence[str], source: str) -> Iterator[str]:
    """Yield the lines of a bundle of finished studies. `source` names this database for readers."""
    header = {"format": FORMAT, "version": VERSION, "source": source, "exported": datetime.now(UTC).isoformat()}
    digest, count = hashlib.sha256(), 0
    rows = (
        {"table": kind.__tablename__, "row": _document(row)}
        for kind, query in _queries(studies).items()
        for row in session.scalars(query.execution_options(yield_per=_ROWS_AT_ONCE))
    )
    for document in itertools.chain((header,), rows):
        line = f"{json.dumps(document)}\n"
        digest.update(line.encode())
        count += 1
        yield line
    yield f"{json.dumps({'rows': count - 1, 'sha256': digest.hexdigest()})}\n"


def _queries(ids: Sequence[str]) -> dict[type[Base], Select[Any]]:
    """Return the query for the rows of each table that belong to the studies, in the order of `_KINDS`."""
    of_workloads = select(StudyRow.workload_fingerprint).where(StudyRow.id.in_(ids))
    workloads = select(WorkloadRow).where(WorkloadRow.fingerprint.in_(of_workloads))

    def of_workload(kind: type[Base], key: Any, reference: Any) -> Select[Any]:
        return select(kind).where(key.in_(workloads.with_only_columns(reference))).order_by(key)

    trials = select(TrialRow).where(TrialRow.study_id.in_(ids))
    of_trials = trials.with_only_columns(TrialRow.id)
    launches = select(LaunchRow).where(LaunchRow.workload_fingerprint.in_(of_workloads), LaunchRow.status != RUNNING)
    best = select(BestPlanRow).where(BestPlanRow.study_id.in_(ids))
    plans = [
        query.with_only_columns(plan_id)
        for query, plan_id in ((trials, TrialRow.plan_id), (launches, LaunchRow.plan_id), (best, BestPlanRow.plan_id))
    ]
    return {
        HardwareRow: of_workload(HardwareRow, HardwareRow.fingerprint, WorkloadRow.hardware_fingerprint),
        ModelRow: of_workload(ModelRow, ModelRow.fingerprint, WorkloadRow.model_fingerprint),
        DataProfileRow: of_workload(DataProfileRow, DataProfileRow.fingerprint, WorkloadRow.data_fingerprint),
        WorkloadRow: workloads.order_by(WorkloadRow.fingerprint),
        LayerProfileRow: select(LayerProfileRow)
        .join(
            WorkloadRow,
            (WorkloadRow.hardware_fingerprint == LayerProfileRow.hardware_fingerprint)
            & (WorkloadRow.model_fingerprint == LayerProfileRow.model_fingerprint),
        )
        .where(WorkloadRow.fingerprint.in_(of_workloads))
        .distinct(),
        PlanRow: select(PlanRow).where(PlanRow.id.in_(union(*plans))).order_by(PlanRow.id),
        StudyRow: select(StudyRow).where(StudyRow.id.in_(ids)).order_by(StudyRow.started),
        TrialRow: trials.order_by(TrialRow.study_id, TrialRow.number),
        OutcomeRow: select(OutcomeRow).where(OutcomeRow.trial_id.in_(of_trials)),
        AttemptRow: select(AttemptRow).where(AttemptRow.trial_id.in_(of_trials)),
        StageMeasurementRow: select(StageMeasurementRow).where(StageMeasurementRow.trial_id.in_(of_trials)),
        BestPlanRow: best,
        LaunchRow: launches.order_by(LaunchRow.started),
    }


@contextmanager
def opened(path: Path) -> Iterator[Iterator[str]]:
    """Open the file of a bundle, which is read twice. Raises BadBundle if that is impossible."""
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
    """Return the digest of a bundle. Raises BadBundle unless it is complete, unchanged and of a known version.

    Only the first and the last line are parsed, and no more than two lines are in memory.
    """
    digest, count, before = hashlib.sha256(), 0, None
    for line in text:
        if before is not None:
            digest.update(before.encode())
        before, count = line, count + 1
        if count == 1:
            _check_header(_parsed(line, 1))
    end = _parsed(before or "", count)
    if end.keys() != {"rows", "sha256"}:
        raise BadBundle(f"the bundle ends in line {count} without its checksum: it is incomplete; copy it again")
    if end["sha256"] != digest.hexdigest():
        raise BadBundle("the bundle was changed since it was exported: its checksum differs; copy it again")
    if end["rows"] != count - 2:
        raise BadBundle(f"the bundle holds {count - 2} rows in place of {end['rows']}; export it again")
    return digest.hexdigest()


def take_in(session: Session, text: Iterable[str], digest: str) -> Imported:
    """Store the rows of a checked bundle that this database lacks. Raises BadBundle."""
    numbered = enumerate(text, 1)
    header = _parsed(next(numbered)[1], 1)
    bundle = BundleRow(
        digest=digest,
        source=header["source"],
        exported=_time(header["exported"]),
        imported=datetime.now(UTC),
    )
    if session.get(BundleRow, digest) is None:
        session.add(bundle)
        session.flush()
    old_keys = OldKeys() if header["version"] == 1 else None
    count, fresh = _stored(session, numbered, digest, old_keys)
    for kind, keys in fresh.items():
        for row in _read(session, kind, keys):
            if (what := problem_of(row)) is not None:
                raise BadBundle(f"the bundle's {row.__tablename__} {provenance.key_of(row)} {what}; export it again")
    for problem in problems_of_studies(session, [key for (key,) in fresh[StudyRow]]):
        raise BadBundle(f"the bundle is incomplete: {problem}; export it again")
    new = sum(map(len, fresh.values()))
    return Imported(source=header["source"], new=new, known=count - new)


def _read(session: Session, kind: type[Base], keys: Sequence[tuple[Any, ...]]) -> Iterator[Base]:
    """Read the rows back from the database."""
    for first in range(0, len(keys), _ROWS_AT_ONCE):
        some = keys[first : first + _ROWS_AT_ONCE]
        yield from session.scalars(select(kind).where(tuple_(*inspect(kind).primary_key).in_(some)))
        session.expunge_all()


def _stored(
    session: Session, numbered: Iterable[tuple[int, str]], digest: str, old_keys: OldKeys | None
) -> tuple[int, dict[type[Base], list[tuple[Any, ...]]]]:
    """Store the rows, and return (number of rows in the bundle, primary keys of the new ones)."""
    kinds = {kind.__tablename__: kind for kind in _KINDS}
    count, fresh = 0, {kind: list[tuple[Any, ...]]() for kind in _KINDS}
    for number, line in numbered:
        document = _parsed(line, number)
        if "sha256" in document:
            break
        kind = kinds.get(str(document.get("table")))
        if kind is None:
            raise BadBundle(f"line {number} of the bundle names no table that can be imported; export it again")
        count += 1
        row = _row(kind, document.get("row"), number)
        if old_keys is not None:
            old_keys.replace(row)
        if _merged(session, row, number):
            session.merge(ProvenanceRow(kind=row.__tablename__, key=provenance.key_of(row), bundle_digest=digest))
            fresh[kind].append(tuple(inspect(kind).primary_key_from_instance(row)))
        if count % _ROWS_AT_ONCE == 0:  # the session would keep every row in memory
            session.flush()
            session.expunge_all()
    session.flush()
    session.expunge_all()
    return count, fresh


def _merged(session: Session, row: Base, number: int) -> bool:
    """Add the row if it is new. A stored row stays, except a trial whose end only the bundle knows."""
    kind = type(row)
    stored = session.get(kind, inspect(kind).primary_key_from_instance(row))
    if stored is None:
        try:
            session.add(row)
            session.flush()
        except (IntegrityError, DataError) as error:
            raise BadBundle(
                f"line {number} of the bundle, of {kind.__tablename__}, refers to a row that is missing, contradicts "
                "one that is stored, or holds a value that cannot be stored; export it again"
            ) from error
        return True
    if isinstance(stored, TrialRow) and isinstance(row, TrialRow) and stored.status != row.status:
        if row.status == FINISHED:
            stored.status, stored.finished, stored.given_up = row.status, row.finished, row.given_up
    elif _differs(session, stored, row):
        raise BadBundle(
            f"line {number} of the bundle contradicts the {kind.__tablename__} {provenance.key_of(row)} that is "
            "stored; what is stored stays"
        )
    return False


def _differs(session: Session, stored: Base, row: Base) -> bool:
    """Return whether the two rows contradict each other.

    One may identify its model only by path, and a bundle of an older version lacks later columns.
    """
    if isinstance(row, LayerProfileRow):
        return False
    ours, theirs = _document(stored), _document(row)
    names = {name for name in ours if name in vars(row) and ours[name] != theirs[name]}
    if isinstance(row, ModelRow):
        names.discard("name")
    if "workload_fingerprint" in names:
        models = (session.get_one(WorkloadRow, each["workload_fingerprint"]).model for each in (ours, theirs))
        if any(model.config_digest.startswith(PATH_DIGEST) for model in models):
            names.remove("workload_fingerprint")
    return bool(names)


def _document(row: Base) -> dict[str, Any]:
    """Return the row as JSON values without references to agents; a running trial counts as abandoned."""
    local = {column.key for column in inspect(type(row)).columns if _is_local(column)}
    values = {name: value for name, value in codec.row_values(row).items() if name not in local}
    if isinstance(row, TrialRow) and row.status == RUNNING:
        values |= {"status": ABANDONED, "finished": row.started}
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in values.items()}


def _row(kind: type[Base], document: Any, number: int) -> Base:
    columns = {column.key: column for column in inspect(kind).columns if not _is_local(column)}
    later = {name for name, column in columns.items() if column.nullable or column.server_default is not None}
    if not isinstance(document, dict) or not columns.keys() - later <= document.keys() <= columns.keys():
        names = set(columns).symmetric_difference(document if isinstance(document, dict) else {})
        raise BadBundle(
            f"line {number} of the bundle does not have the columns of {kind.__tablename__}: "
            f"{', '.join(sorted(names)) or 'none'}; export it again with this version"
        )
    return kind(**{name: _value(columns[name], value, number) for name, value in document.items()})


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
        raise BadBundle(f"line {number} of the bundle: {column.key} is no {wanted.__name__}; export it again")
    if wanted is int and value not in WHOLE:
        raise BadBundle(
            f"line {number} of the bundle: {column.key} is {value}, which cannot be stored; export it again"
        )
    return value


def _is_local(column: Column[Any]) -> bool:
    """Return whether the column refers to an agent."""
    return any(key.column.table.name == AgentRow.__tablename__ for key in column.foreign_keys)


def _time(value: Any) -> datetime:
    try:
        time = datetime.fromisoformat(value)
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    except (TypeError, ValueError, OverflowError):
        raise BadBundle(f"the bundle has {value!r} for a time; export it again") from None


def _check_header(header: dict[str, Any]) -> None:
    if header.get("format") != FORMAT:
        raise BadBundle(f"this is no file that `autotune db export` wrote; its first line is not of an {FORMAT}")
    if header.get("version") not in READABLE:
        raise BadBundle(
            f"the bundle has version {header.get('version')!r}, this software reads {READABLE[0]} to {VERSION}; export "
            "it again with the same version of vlm-autotune"
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
