"""Change of the keys of a stored model and its workloads, with all references to them."""

from collections.abc import Mapping

from sqlalchemy import Connection, Table, and_, delete, exists, insert, literal, select, update
from sqlalchemy.sql.elements import ColumnElement

_MODEL, _WORKLOAD, _PROFILE = "autotune_model", "autotune_workload", "autotune_layer_profile"
_PROVENANCE = "autotune_provenance"
_OF_WORKLOADS = ("autotune_study", "autotune_best_plan", "autotune_launch")


class Rekeying:
    """Change of keys in one transaction. A row whose new key is taken is merged into the row that has it."""

    def __init__(self, connection: Connection, tables: Mapping[str, Table]) -> None:
        """Work on `tables`, by name."""
        self._connection = connection
        self._tables = tables

    def model(self, old: str, new: str, config_digest: str, workloads: Mapping[str, str]) -> None:
        """Give a model its new key and digest; `workloads` maps the old to the new keys of its workloads."""
        # References allow no other order: the new row, then what refers to it, and the old row last.
        self._copy(_MODEL, old, {"fingerprint": new, "config_digest": config_digest})
        self._move(_WORKLOAD, "model_fingerprint", old, new)
        self._profiles(old, new)
        for before, after in workloads.items():
            self._copy(_WORKLOAD, before, {"fingerprint": after})
            for name in _OF_WORKLOADS:
                self._move(name, "workload_fingerprint", before, after)
            self._remove(_WORKLOAD, before)
        self._remove(_MODEL, old)

    def _copy(self, name: str, old: str, changes: Mapping[str, str]) -> None:
        """Copy the row, with its provenance, to its new key unless that is taken."""
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
        """Move the layer profiles; of two with the same key keep the local one, else the newer."""
        table = self._tables[_PROFILE]
        for row in self._connection.execute(select(table).where(table.c.model_fingerprint == old)).mappings().all():
            key = {column.name: row[column.name] for column in table.primary_key}
            moved = {**key, "model_fingerprint": new}
            here, there = _equal(table, key), _equal(table, moved)
            created = self._connection.scalar(select(table.c.created).where(there))
            before, after = ("/".join(values.values()) for values in (key, moved))
            if created is not None:
                ours, theirs = (not self._is_foreign(_PROFILE, each) for each in (before, after))
                if (theirs, created) >= (ours, row["created"]):
                    self._connection.execute(delete(table).where(here))
                    self._forget(_PROFILE, before)
                    continue
                self._connection.execute(delete(table).where(there))
                self._forget(_PROFILE, after)
            self._connection.execute(update(table).where(here).values(model_fingerprint=new))
            self._follow(_PROFILE, before, after, is_taken=False)

    def _follow(self, kind: str, old: str, new: str, *, is_taken: bool) -> None:
        """Move the provenance of a row; if one of two merged rows is local, so is the result."""
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
