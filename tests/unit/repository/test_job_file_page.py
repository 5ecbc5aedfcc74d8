"""docs/job-file.md matches the code: keys, defaults and values."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from autotune.job_file import load_job
from tests.unit.repository.test_docs import ROOT, documents, rows, rows_of, spans
from trials import plugins, strict_yaml
from trials.job import Job

JOB_FILE = ROOT / "docs" / "job-file.md"
EXAMPLE_JOB = ROOT / "examples" / "tiny-internvl" / "job.yaml"
SOURCES = "data.sources[]."
SECTIONS = "|".join(Job.model_fields.keys() - {"database"})
MODULES = {
    "search.sampler": "autotune.search.samplers",
    "training.loggers": "autotune.loggers",
    "hardware.launcher": "trials.sites",
}
"""Packages of whose modules a key names some."""


def fields(section: type[BaseModel] = Job, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the job file that holds a value, dotted."""
    for name, field in section.model_fields.items():
        is_list = bool(get_args(field.annotation)) and get_args(field.annotation)[-1] is Ellipsis
        inner = get_args(field.annotation)[0] if is_list else field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from fields(inner, f"{prefix}{name}{'[]' if is_list else ''}.")
        else:
            yield f"{prefix}{name}", field


def documented_defaults() -> dict[str, str]:
    """Default by key, as the tables of the job file have it."""
    return {key.strip("`"): default.strip("`") for key, default, _ in rows(JOB_FILE, "key", "default", "meaning")}


def load(path: Path, values: Iterable[tuple[str, Any]]) -> Job:
    """A job with these values, besides the ones that it needs."""
    source: dict[str, Any] = {"path": "train.jsonl"}
    document: dict[str, Any] = {"model": {"path": "model"}, "data": {"sources": [source]}}
    for key, value in values:
        *sections, name = key.split(".")
        part = source if key.startswith(SOURCES) else document
        for section in () if part is source else sections:
            part = part.setdefault(section, {})
        part[name] = value
    path.write_text(json.dumps(document))
    return load_job(path)


def test_every_key_of_the_job_file_is_documented_once() -> None:
    keys = [row[0].strip("`") for row in rows(JOB_FILE, "key", "default", "meaning")]
    assert sorted(keys) == sorted(key for key, _ in fields())


def test_each_key_of_the_job_file_stands_under_the_heading_of_its_section() -> None:
    for part in JOB_FILE.read_text().split("\n## ")[1:]:
        section = part.partition("\n")[0]
        for cell, *_ in rows_of(part, "key", "default", "meaning"):
            key = cell.strip("`").replace("[]", "").replace("data.sources.", "data.")
            assert key.rpartition(".")[0] == section or key == section


def test_required_and_optional_keys_are_documented_as_such() -> None:
    documented = documented_defaults()
    assert {key for key in documented if documented[key] == "required"} == {
        key for key, field in fields() if field.is_required()
    }
    assert {key for key in documented if documented[key] == "absent"} == {
        key for key, field in fields() if not field.is_required() and field.default is None
    }


def test_documented_defaults_are_those_of_the_job(tmp_path: Path) -> None:
    documented = documented_defaults().items()
    values = {
        key: strict_yaml.read(text.encode()).value for key, text in documented if text not in ("required", "absent")
    }
    assert load(tmp_path / "job.yaml", values.items()) == load(tmp_path / "job.yaml", ())


def test_the_values_that_a_key_may_have_are_documented() -> None:
    meanings = {key.strip("`"): meaning for key, _, meaning in rows(JOB_FILE, "key", "default", "meaning")}
    for key, each in choices():
        assert f"`{each}`" in meanings[key], f"{key}: {each}"


def test_the_comments_of_a_new_job_file_name_the_values_that_a_key_may_have() -> None:
    descriptions = {key: field.description or "" for key, field in fields()}
    for key, each in choices():
        assert re.search(rf"\b{each}\b", descriptions[key]), f"{key}: {each}"


def choices() -> Iterator[tuple[str, str]]:
    """Yield each key that has one of several names, with each of these."""
    for key, field in fields():
        yield from ((key, each) for each in words(field.annotation))
    for key, package in MODULES.items():
        yield from ((key, each) for each in plugins.names(plugins.Plugins(package)))


def words(annotation: Any) -> Iterator[str]:
    """Yield the texts among which the type of a key chooses."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for inner in get_args(annotation):
            yield from words(inner)


def test_the_example_job_can_be_loaded() -> None:
    job = load_job(EXAMPLE_JOB)
    assert job.data.sources[0].path == EXAMPLE_JOB.parent / "data" / "train.jsonl"


@documents
def test_keys_that_the_documents_name_are_those_of_the_job(document: Path) -> None:
    keys = {key.replace("[]", "") for key, _ in fields()}
    known = {".".join(key.split(".")[:length]) for key in keys for length in range(1, 5)}
    named = {key for span in spans(document) for key in re.findall(rf"^(?:{SECTIONS})\.[a-z_.]*[a-z]", span)}
    assert named <= known
