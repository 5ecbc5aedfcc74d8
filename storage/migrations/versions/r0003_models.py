"""Models are keyed by what they are: no longer by their name, nor by a digest that their path is a part of.

A model cannot be identified by such a digest. It stays, marked with `path:`, so that the same folder in the same
place is recognised (`storage.queries.workloads.adopt_model`); everywhere else the model is unknown, and its plans are
to be measured again. A row that did not have its own content for its key is left as it is, for `autotune db check`.
Gradients were summed in the type of the weights before.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json
from sqlalchemy import (
    Column,
    Connection,
    MetaData,
    Table,
    Text,
    and_,
    cast,
    delete,
    exists,
    insert,
    literal,
    select,
    update,
)
from sqlalchemy.sql.elements import ColumnElement

revision = "0003"
down_revision = "0002"

MARK = "path:"
Row = Mapping[str, Any]
_COSTS = ("vision_layers", "language_layers", "parameters", "unit_flops", "token_flops", "square_flops")
_MODEL = ("family", "dtype", *_COSTS, "config_digest")
_LENGTHS = ("vision_units", "text_tokens", "longest_text_tokens", "most_vision_units", "histogram", "lengths_digest")
_DATA = ("samples", "text_only_samples", *_LENGTHS)
_DEVICES = ("accelerator", "device_name", "devices", "device_memory_bytes", "compute_capability", "driver")
_HARDWARE = (*_DEVICES, "cpu_name", "cpu_cores", "ram_bytes")
_DEFAULTS = {"nodes": 1, "link": None, "topology": None}
_SOFTWARE = ("python", "torch", "deepspeed", "transformers")
_SETTINGS = ("oversize", "global_batch_samples", "memory_limit_bytes")
_MODELS, _WORKLOADS, _PROFILES = "autotune_model", "autotune_workload", "autotune_layer_profile"
_PROVENANCE = "autotune_provenance"
_OF_WORKLOADS = ("autotune_study", "autotune_best_plan", "autotune_launch")


def upgrade() -> None:
    from alembic import op  # noqa: PLC0415 - imports of bundles use the keys below, without Alembic

    op.add_column("autotune_model", Column("gradient_dtype", Text()))
    connection, tables = op.get_bind(), MetaData()
    tables.reflect(connection, only=lambda name, _: name.startswith("autotune_"))
    rekey(connection, tables.tables)


def rekey(connection: Connection, tables: Mapping[str, Table]) -> None:
    """Change the keys of all models and workloads that have those of an older revision.

    `tables` may have later columns: repairs call this too, for the rows of a file that an older version wrote.
    """
    models, hardware, data, workloads = (
        _rows(connection, tables[f"autotune_{name}"]) for name in ("model", "hardware", "data_profile", "workload")
    )
    of_models: dict[str, dict[str, str]] = {key: {} for key in models}
    for key, row in workloads.items():
        model, machine = models.get(row["model_fingerprint"]), hardware.get(row["hardware_fingerprint"])
        lengths = data.get(row["data_fingerprint"])
        if not (model and machine and lengths):  # of a damaged file
            continue
        if is_old(model) and old_workload_key(row, model, machine, lengths) == key:
            of_models[model["fingerprint"]][key] = workload_key(row, marked(model), machine, lengths)
    work = _Rekeying(connection, tables)
    for key, model in models.items():
        if is_old(model):
            new = marked(model)
            work.model(key, new["fingerprint"], new["config_digest"], of_models[key])


def _rows(connection: Connection, table: Table) -> dict[str, Row]:
    """Return the rows by key. The histogram is read as text: a damaged one must not end the upgrade."""
    columns = (cast(column, Text).label(column.name) if column.name == "histogram" else column for column in table.c)
    return {row["fingerprint"]: dict(row) for row in connection.execute(select(*columns)).mappings()}


def is_old(model: Row) -> bool:
    """Return whether the model has the key of an older revision."""
    return bool(model["fingerprint"] == _digest({"name": model["name"], **_of(model, _MODEL)}))


def marked(model: Row) -> Row:
    """Return the model with its new digest and key."""
    new = {**model, "config_digest": f"{MARK}{model['config_digest']}"}
    return {**new, "fingerprint": _digest(_of(new, _MODEL))}


def old_workload_key(row: Row, model: Row, hardware: Row, data: Row) -> str:
    """Return the key that an older revision gave."""
    return _workload_key(row, {"name": model["name"], **_of(model, _MODEL)}, hardware, data)


def workload_key(row: Row, model: Row, hardware: Row, data: Row) -> str:
    """Return the key since this revision."""
    return _workload_key(row, _of(model, _MODEL), hardware, data)


def _workload_key(row: Row, model: Row, hardware: Row, data: Row) -> str:
    # Fields that came later are left out at their defaults, so that older keys stay valid.
    later = {name: hardware[name] for name, default in _DEFAULTS.items() if hardware[name] != default}
    document = {
        "model": model,
        "data": {**_of(data, _DATA), "histogram": _histogram(data)},
        "hardware": {**_of(hardware, _HARDWARE), **later},
        "software": _of(row, _SOFTWARE),
        **_of(row, _SETTINGS),
    }
    return _digest(document)


def _histogram(data: Row) -> Any:
    try:
        return json.loads(data["histogram"]) if isinstance(data["histogram"], str) else data["histogram"]
    except ValueError:
        return None


def _of(row: Row, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: row[name] for name in names}


def _digest(document: Row) -> str:
    # A damaged file may hold bytes in place of a text; they give another key, and no error.
    return hashlib.sha256(to_json(document, bytes_mode="base64")).hexdigest()[:16]


class _Rekeying:
    """Change of keys in one transaction. A row whose new key is taken is joined with the one that has it.

    A copy of `storage.database.rekeying` as it was at the release of this revision: neither can break the other.
    """

    def __init__(self, connection: Connection, tables: Mapping[str, Table]) -> None:
        self._connection = connection
        self._tables = tables

    def model(self, old: str, new: str, config_digest: str, workloads: Mapping[str, str]) -> None:
        """Give a model its new key and digest; `workloads` are the old and new keys of those with this model."""
        self._copy(_MODELS, old, {"fingerprint": new, "config_digest": config_digest})
        self._move(_WORKLOADS, "model_fingerprint", old, new)
        self._profiles(old, new)
        for before, after in workloads.items():
            self._copy(_WORKLOADS, before, {"fingerprint": after})
            for name in _OF_WORKLOADS:
                self._move(name, "workload_fingerprint", before, after)
            self._remove(_WORKLOADS, before)
        self._remove(_MODELS, old)

    def _copy(self, name: str, old: str, changes: Mapping[str, str]) -> None:
        """Copy a row to its new key, unless there is one, and with it where it came from."""
        table, new = self._tables[name], changes["fingerprint"]
        is_taken = self._has(table, table.c.fingerprint == new)
        if not is_taken:
            values = [literal(changes[column.name]) if column.name in changes else column for column in table.c]
            row = select(*values).where(table.c.fingerprint == old)
            self._connection.execute(insert(table).from_select(table.c.keys(), row))
        self._follow(name, old, new, is_taken=is_taken)

    def _move(self, name: str, column: str, old: str, new: str) -> None:
        table = self._tables[name]
        self._connection.execute(update(table).where(table.c[column] == old).values({column: new}))

    def _remove(self, name: str, key: str) -> None:
        table = self._tables[name]
        self._connection.execute(delete(table).where(table.c.fingerprint == key))

    def _profiles(self, old: str, new: str) -> None:
        """Move profiles to the new key. Of two for one key, keep the one that was measured here, else the newer."""
        table = self._tables[_PROFILES]
        for row in self._connection.execute(select(table).where(table.c.model_fingerprint == old)).mappings().all():
            key = {column.name: row[column.name] for column in table.primary_key}
            moved = {**key, "model_fingerprint": new}
            here, there = _equal(table, key), _equal(table, moved)
            created = self._connection.scalar(select(table.c.created).where(there))
            before, after = ("/".join(values.values()) for values in (key, moved))
            if created is not None:
                ours, theirs = (not self._is_foreign(_PROFILES, each) for each in (before, after))
                if (theirs, created) >= (ours, row["created"]):
                    self._connection.execute(delete(table).where(here))
                    self._forget(_PROFILES, before)
                    continue
                self._connection.execute(delete(table).where(there))
                self._forget(_PROFILES, after)
            self._connection.execute(update(table).where(here).values(model_fingerprint=new))
            self._follow(_PROFILES, before, after, is_taken=False)

    def _follow(self, kind: str, old: str, new: str, *, is_taken: bool) -> None:
        """Move the note of where a row came from; of two that are joined, one that was measured here makes both so."""
        if not is_taken:
            table = self._tables[_PROVENANCE]
            self._connection.execute(update(table).where(_equal(table, {"kind": kind, "key": old})).values(key=new))
            return
        if not self._is_foreign(kind, old):
            self._forget(kind, new)
        self._forget(kind, old)

    def _is_foreign(self, kind: str, key: str) -> bool:
        table = self._tables[_PROVENANCE]
        return self._has(table, _equal(table, {"kind": kind, "key": key}))

    def _forget(self, kind: str, key: str) -> None:
        table = self._tables[_PROVENANCE]
        self._connection.execute(delete(table).where(_equal(table, {"kind": kind, "key": key})))

    def _has(self, table: Table, condition: ColumnElement[bool]) -> bool:
        return bool(self._connection.scalar(select(exists(select(literal(1)).select_from(table).where(condition)))))


def _equal(table: Table, values: Mapping[str, str]) -> ColumnElement[bool]:
    return and_(*(table.c[name] == value for name, value in values.items()))
