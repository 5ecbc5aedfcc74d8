"""Text of a job file: every key of its sections with its meaning; keys with their defaults are comments."""

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from autotune.draft.draft import Draft
from trials.job import Job
from trials.units import parse_seconds, time_setting

# A choice: comments of the job stay readable in a terminal of 100 columns.
_WIDTH = 100
_HEADER = "A job of autotune. Keys after `#` have the default that is shown; docs/job-file.md describes all of them."
_OTHERS, _OTHER_SECTIONS = "other keys, with their defaults", "other keys and sections, with their defaults"
_ALWAYS = ("training.global_batch_samples", "training.learning_rate", "search.trials", "search.time_limit")
"""Keys that are always written, so that their sections are there."""


def job_text(draft: Draft) -> str:
    """Return the job file of a draft."""
    values = {key: _default(key) for key in _ALWAYS} | draft.values
    unknown = values.keys() - set(_keys(Job))
    assert not unknown, f"no keys of a job: {unknown}"
    notes = (textwrap.wrap(note, _WIDTH, initial_indent="# - ", subsequent_indent="#   ") for note in draft.notes)
    return "\n".join((f"# {_HEADER}", *(line for note in notes for line in note), *_section(Job, "", values))) + "\n"


def _keys(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}"
        if inner := _section_of(field):
            yield from _keys(inner, f"{prefix}{name}.")


def _default(key: str) -> Any:
    section, _, name = key.partition(".")
    kind = _section_of(Job.model_fields[section])
    assert kind, f"{section} is a section"
    return kind.model_fields[name].default


def _section(section: type[BaseModel], prefix: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a section, indented as deep as its keys: first those of `values`, then the others."""
    indent = "  " * prefix.count(".")

    def is_given(name: str) -> bool:
        return any(f"{key}.".startswith(f"{prefix}{name}.") for key in values)

    names = sorted(section.model_fields, key=is_given, reverse=True)
    first_other = next((name for name in names if not is_given(name)), None)
    for name in names:
        if name == first_other:
            yield f"{indent}# --- {_OTHERS if prefix else _OTHER_SECTIONS} ---"
        field, key = section.model_fields[name], f"{prefix}{name}"
        inner = _section_of(field)
        if inner and is_given(name):
            yield from (f"{indent}{name}:", *_section(inner, f"{key}.", values))
            continue
        meaning = " ".join((field.description or "").split())
        yield from textwrap.wrap(meaning, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        mark, value = ("", values[key]) if key in values else ("# ", None if inner else field.default)
        yield f"{indent}{mark}{name}:{_written(time_setting(value) if value and _is_time(field) else value)}"


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _is_time(field: FieldInfo) -> bool:
    return any(getattr(check, "func", None) is parse_seconds for check in field.metadata)


def _written(value: object) -> str:
    """Return a value as it follows a key in YAML; nothing for None."""
    plain = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
    # The first line alone: PyYAML ends a scalar with a second one, `...`.
    text = yaml.safe_dump(plain, default_flow_style=True, width=1 << 20, sort_keys=False).partition("\n")[0]
    return "" if plain is None else f" {text}"
