"""Keys of models and workloads in bundles of version 1, as databases had them up to revision 0002."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Table

from storage.database.tables import DATA_PROFILE, HARDWARE, MODEL, WORKLOAD
from storage.migrations.versions import r0003_models as revision

_PARTS = {
    HARDWARE: "hardware_fingerprint",
    MODEL: "model_fingerprint",
    DATA_PROFILE: "data_fingerprint",
}


class OldKeys:
    """Translation of the rows of one bundle, in its order, to the present keys."""

    def __init__(self) -> None:
        self._new: dict[tuple[str, str], str] = {}
        """New keys by the name of the referring column and the old key."""
        self._parts: dict[tuple[str, str], Mapping[str, Any]] = {}
        """Hardware, models and data of the workloads, by the same key."""

    def replaced(self, table: Table, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row with present keys; it keeps a key that does not match its content, and is refused later."""
        given: dict[str, Any] = {column.name: row.get(column.name) for column in table.columns}
        new = dict(row)
        reference = _PARTS.get(table)
        if reference is not None:
            self._parts[reference, given["fingerprint"]] = given
        if table is MODEL and revision.is_old(given):
            marked = revision.marked(given)
            new |= {name: marked[name] for name in ("fingerprint", "config_digest")}
            self._new["model_fingerprint", given["fingerprint"]] = new["fingerprint"]
        if table is WORKLOAD:
            new["fingerprint"] = self._workload_key(given)
        for name in ("model_fingerprint", "workload_fingerprint"):
            if name in given:
                new[name] = self._new.get((name, given[name]), given[name])
        return new

    def _workload_key(self, given: Mapping[str, Any]) -> str:
        old: str = given["fingerprint"]
        hardware, model, data = (self._parts.get((name, given[name])) for name in _PARTS.values())
        if not (hardware and model and data) or revision.old_workload_key(given, model, hardware, data) != old:
            return old
        new = revision.workload_key(given, revision.marked(model), hardware, data)
        self._new["workload_fingerprint", old] = new
        return new
