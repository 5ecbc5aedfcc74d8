"""Each speed is named by what it is, what disturbed a trial is its disturbance, and the current plan is called that.

`samples_per_second` was measured in a trial, estimated for an epoch from trials, or that of a training.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

revision = "0009"
down_revision = "0008"

_COLUMNS = {
    "autotune_study": {"lessons": "calibration_state"},
    "autotune_outcome": {"samples_per_second": "measured_samples_per_second", "contamination": "disturbance"},
    "autotune_attempt": {"contamination": "disturbance"},
    "autotune_best_plan": {
        "samples_per_second": "estimated_samples_per_second",
        "samples_per_second_error": "estimated_samples_per_second_error",
    },
    "autotune_launch": {
        "samples_per_second": "training_samples_per_second",
        "predicted_samples_per_second": "promised_samples_per_second",
    },
    "autotune_launch_window": {"samples_per_second": "training_samples_per_second"},
}
"""Old and new names by table."""
_WINNERS = "autotune_best_plan"
_TRIALS, _ROLE, _NEW_ROLE = "autotune_trial", "present", "current-plan"
_DOCUMENTS = ("baselines", "pareto", "explanation")
"""Columns of winners with JSON of speeds or roles."""
# The quote before a name keeps the new one from being replaced again, and texts hold no quote without a backslash.
_IN_DOCUMENTS = (
    ('"samples_per_second', '"estimated_samples_per_second'),
    *((f'"{field}":"{_ROLE}"', f'"{field}":"{_NEW_ROLE}"') for field in ("role", "usual")),
)
_IN_RESULTS = (
    (b'"contamination":', b'"disturbance":'),
    (b'"samples_per_second":', b'"training_samples_per_second":'),
)


def upgrade() -> None:
    from alembic import op  # noqa: PLC0415 - bundles, repairs and spools use the names below, without Alembic

    for table, names in _COLUMNS.items():
        for old, new in names.items():
            op.execute(f"ALTER TABLE {table} RENAME COLUMN {old} TO {new}")
    op.execute(f"UPDATE {_TRIALS} SET role = '{_NEW_ROLE}' WHERE role = '{_ROLE}'")  # noqa: S608
    for column, (old, new) in product(_DOCUMENTS, _IN_DOCUMENTS):
        op.execute(f"UPDATE {_WINNERS} SET {column} = replace({column}, '{old}', '{new}')")  # noqa: S608


def renamed(table: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row, of this or an older revision, with the names since this one."""
    names = _COLUMNS.get(table, {})
    found = {names.get(name, name): value for name, value in row.items()}
    if table == _TRIALS and found.get("role") == _ROLE:
        found["role"] = _NEW_ROLE
    for column in _DOCUMENTS if table == _WINNERS else ():
        for pair in _IN_DOCUMENTS if isinstance(found.get(column), str) else ():  # a damaged file may hold anything
            found[column] = found[column].replace(*pair)
    return found


def renamed_result(document: bytes) -> bytes:
    """Return the JSON of a result that waits for its database with the names since this revision."""
    for old, new in _IN_RESULTS:
        document = document.replace(old, new)
    return document
