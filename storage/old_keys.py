"""Keys of models and workloads in bundles of version 1, as databases had them up to revision 0002."""

from collections.abc import Mapping
from typing import Any

from storage.database.tables import Base, DataProfileRow, HardwareRow, ModelRow, WorkloadRow
from storage.migrations.versions import r0003_models as revision
from storage.queries.codec import row_values

_PARTS = {
    HardwareRow.__tablename__: "hardware_fingerprint",
    ModelRow.__tablename__: "model_fingerprint",
    DataProfileRow.__tablename__: "data_fingerprint",
}


class OldKeys:
    """Translate the rows of one bundle, in its order, to the present keys."""

    def __init__(self) -> None:
        self._new: dict[tuple[str, str], str] = {}
        """New keys by the name of the referring column and the old key."""
        self._parts: dict[tuple[str, str], Mapping[str, Any]] = {}
        """Hardware, models and data of the workloads, by the same key."""

    def replace(self, row: Base) -> None:
        """Change the row. A row whose key does not match its content keeps it, and is refused later."""
        values, reference = row_values(row), _PARTS.get(row.__tablename__)
        if reference is not None:
            self._parts[reference, values["fingerprint"]] = values
        if isinstance(row, ModelRow) and revision.is_old(values):
            new = revision.marked(values)
            self._new["model_fingerprint", row.fingerprint] = new["fingerprint"]
            row.fingerprint, row.config_digest = new["fingerprint"], new["config_digest"]
        if isinstance(row, WorkloadRow):
            self._replace_workload(row, values)
        for name in ("model_fingerprint", "workload_fingerprint"):
            if name in values:
                setattr(row, name, self._new.get((name, values[name]), values[name]))

    def _replace_workload(self, row: WorkloadRow, values: Mapping[str, Any]) -> None:
        hardware, model, data = (self._parts.get((name, values[name])) for name in _PARTS.values())
        if not (hardware and model and data):
            return
        if revision.old_workload_key(values, model, hardware, data) == row.fingerprint:
            new = revision.workload_key(values, revision.marked(model), hardware, data)
            self._new["workload_fingerprint", row.fingerprint] = new
            row.fingerprint = new
