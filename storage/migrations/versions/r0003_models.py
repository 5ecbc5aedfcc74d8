"""Models are keyed by what they are: no longer by their name, nor by a digest that their path is a part of.

What a model is cannot be told from such a digest. It stays, marked with `path:`, so that the same folder in the same
place is recognised (`storage.queries.workloads.adopt_model`); everywhere else the model is unknown, and its plans are
to be measured again. A row that did not have its own content for its key is left as it is, for `autotune db check`.
Gradients were summed in the type of the weights before.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json
from sqlalchemy import Column, Connection, MetaData, Table, Text, cast, select

from storage.database.rekeying import Rekeying

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


def upgrade() -> None:
    from alembic import op  # noqa: PLC0415 - imports of bundles use the keys below, without Alembic

    op.add_column("autotune_model", Column("gradient_dtype", Text()))
    connection, tables = op.get_bind(), MetaData()
    tables.reflect(connection, only=lambda name, _: name.startswith("autotune_"))
    rekey(connection, tables.tables)


def rekey(connection: Connection, tables: Mapping[str, Table]) -> None:
    """Changes the keys of all models and workloads that have those of an older revision."""
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
    work = Rekeying(connection, tables)
    for key, model in models.items():
        if is_old(model):
            new = marked(model)
            work.model(key, new["fingerprint"], new["config_digest"], of_models[key])


def _rows(connection: Connection, table: Table) -> dict[str, Row]:
    """By key. The histogram is read as text: a damaged one must not end the upgrade."""
    columns = (cast(column, Text).label(column.name) if column.name == "histogram" else column for column in table.c)
    return {row["fingerprint"]: dict(row) for row in connection.execute(select(*columns)).mappings()}


def is_old(model: Row) -> bool:
    """Whether the model has the key of an older revision."""
    return bool(model["fingerprint"] == _digest({"name": model["name"], **_of(model, _MODEL)}))


def marked(model: Row) -> Row:
    """The model with its new digest and key."""
    new = {**model, "config_digest": f"{MARK}{model['config_digest']}"}
    return {**new, "fingerprint": _digest(_of(new, _MODEL))}


def old_workload_key(row: Row, model: Row, hardware: Row, data: Row) -> str:
    """The key that an older revision gave."""
    return _workload_key(row, {"name": model["name"], **_of(model, _MODEL)}, hardware, data)


def workload_key(row: Row, model: Row, hardware: Row, data: Row) -> str:
    """The key since this revision."""
    return _workload_key(row, _of(model, _MODEL), hardware, data)


def _workload_key(row: Row, model: Row, hardware: Row, data: Row) -> str:
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
    return hashlib.sha256(to_json(document, bytes_mode="base64")).hexdigest()[:16]
