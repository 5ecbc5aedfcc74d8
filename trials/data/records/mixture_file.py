"""The document that a mixture file holds: one JSON object, or YAML."""

import os
from pathlib import Path
from typing import Any

from trials import strict_yaml
from trials.data.records.file_chunk import open_annotations
from trials.data.records.record import MAX_RECORD_BYTES, RecordError, parse
from trials.errors import DataError

# A choice: lists of data sets have some KiB, and YAML is slow to parse.
_MAX_YAML_BYTES = 1 << 20


def read_mapping(path: Path) -> dict[str, Any] | None:
    """Return the file's mapping by name; None when it holds anything else. Raise DataError when it cannot be opened.

    Raise DataError also for YAML that is faulty, holds a tag or an alias, or gives a key twice.
    """
    if os.path.isdir(path):  # noqa: PTH112 - false, not an error, for what cannot be a path
        return None
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    with open_annotations(path) as stream:
        text = stream.read((_MAX_YAML_BYTES if is_yaml else MAX_RECORD_BYTES) + 1)
    if is_yaml:
        return _from_yaml(path, text)
    try:
        value = parse(text, dict)
    except RecordError:
        return None
    # Only a mapping of objects can be a mixture; then a key given twice would hide an entry.
    if all(isinstance(entry, dict) for entry in value.values()):
        try:
            parse(text)
        except RecordError as error:
            raise DataError(f"{path}: {error}") from error
    return value


def _from_yaml(path: Path, text: bytes) -> dict[str, Any] | None:
    if len(text) > _MAX_YAML_BYTES:
        raise DataError(
            f"{path} is longer than {_MAX_YAML_BYTES >> 20} MiB, which no list of data sets is; correct its path"
        )
    try:
        document = strict_yaml.read(text)
    except strict_yaml.NotYaml as error:
        raise DataError(f"{path}: {error}; correct the file") from error
    if document.mistakes:
        raise DataError(f"{path}: {document.mistakes[0]}")
    return document.value if isinstance(document.value, dict) else None
