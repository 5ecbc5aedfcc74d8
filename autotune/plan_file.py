"""Plan files: written by hand, or printed by another command."""

import json
from pathlib import Path

from autotune.errors import PredictError
from trials import strict_yaml, wire
from trials.errors import InvalidPlan, WireError
from trials.plan import Plan
from trials.strict_yaml import NotYaml

SUFFIXES = (".yaml", ".yml", ".json")
# A choice: a plan has some KiB, even with a hundred stages.
_MOST_BYTES = 1 << 20
_FORM = "a plan has the keys packing, layout and stages, as `autotune show PLAN --json` prints it under `plan`"


def is_plan_file(text: str) -> bool:
    """Return whether a text names a file rather than the ID of a plan."""
    return Path(text).suffix in SUFFIXES or Path(text).exists()


def read_plan(path: Path) -> Plan:
    """Return the plan in a YAML or JSON file, which may be a command's output with the plan under the key `plan`.

    Raise PredictError.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise PredictError(
            f"{path} cannot be read ({why}); give a file such as `autotune show PLAN --json` prints"
        ) from error
    if len(content) > _MOST_BYTES:
        raise PredictError(f"{path} is larger than {_MOST_BYTES >> 20} MiB; {_FORM}")
    value = _value(path, content)
    if isinstance(value, dict) and isinstance(value.get("plan"), dict):
        value = value["plan"]
    try:
        return wire.decode(Plan, json.dumps(value))
    except InvalidPlan as error:
        raise PredictError(f"{path}: {error}") from error
    except WireError as error:
        raise PredictError(f"{path}: {error}; {_FORM}") from error


def _value(path: Path, content: bytes) -> object:
    try:
        document = strict_yaml.read(content)
    except NotYaml as error:
        raise PredictError(f"{path}, {error.mistake}") from error
    if document.mistakes:
        raise PredictError("\n".join(f"{path}, {mistake}" for mistake in document.mistakes))
    return document.value
