"""Reading of jobs: from YAML, or from values in memory, to a checked `Job` with absolute paths."""

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from autotune.errors import JobError
from trials import strict_yaml
from trials.job import Job, Source
from trials.model.hub import folder_of
from trials.strict_yaml import Document, Mistake, NotYaml, Place, dotted

# A choice: `autotune init` writes some 4 KiB, and a far larger file is a data set that is given by mistake.
_MOST_BYTES = 1 << 18
_EXPECTED = {
    "bool_type": "true or false",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "string_too_short": "a text that is not empty",
    "string_type": "a text; put quotes around it",
    "path_type": "a path; put quotes around it",
    "tuple_type": "a list, with a dash before each entry",
    "too_short": "a list with at least one entry",
}


_KEY = re.compile(r"\w+(\[\d{1,4}\])*(\.\w+(\[\d{1,4}\])*)*", re.ASCII)
_KEY_PART = re.compile(r"\w+", re.ASCII)
_NO_LINE = 0
"""Line of values that the command line sets."""

JobLike: TypeAlias = Job | str | os.PathLike[str] | Mapping[str, Any]
"""A job, the path of a job file, or the sections and keys of one as a mapping."""


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A job file, and values of the command line that replace its own."""

    path: Path
    changes: tuple[str, ...] = ()
    """Each is KEY=VALUE, as in `load_job`."""

    @cached_property
    def job(self) -> Job:
        """Read once, since it may be a pipe. Raise JobError like `load_job`."""
        return load_job(self.path, self.changes)


def load_job(path: str | os.PathLike[str], changes: Iterable[str] = ()) -> Job:
    """Return the job that the file describes; relative paths are made absolute against the file's folder.

    `changes` replace values of the file, or add some: KEY=VALUE with a dotted key, such as `training.epochs=2` or
    `data.sources[0].repeat=2`, and a value in YAML; null removes a section. `model.path` is taken for a hub id when no
    such folder exists; of a model in the hub's cache it becomes the folder there.
    Raise JobError, which lists every mistake with its line or change, the key, the value and the remedy.
    """
    if not isinstance(path, str | os.PathLike):
        raise JobError(f"load_job takes the path of a job file, not {_shown(path)}; give one")
    if isinstance(changes, str):  # its characters would be taken for changes
        raise JobError(f"load_job takes a list of changes, not the text {_shown(changes)}; put it in a list")
    path = Path(path)
    document = _read(_content(path), path)
    if isinstance(document.value, dict) and document.value and not document.value.keys() & Job.model_fields.keys():
        raise JobError(
            f"{path}: none of its keys is a section of a job ({', '.join(Job.model_fields)}); `autotune init --from "
            f"{path}` writes a job from the configuration of another trainer"
        )
    for change in changes:
        _apply(document, change)
    return _absolute(_checked(document, path), path.absolute().parent)


def job_of_text(text: bytes, folder: Path) -> Job:
    """Return the job of a text, with relative paths made absolute against `folder`. Raise JobError like `load_job`."""
    return _absolute(_checked(_read(text)), folder)


def as_job(job: JobLike) -> Job:
    """Return the job that a path, a mapping or a job stands for.

    Relative paths of a mapping or a job are relative to the current folder. Raise JobError like `load_job`.
    """
    match job:
        case Job():
            return _absolute(job, Path.cwd())
        case Mapping():
            return job_of_values(job)
        case str() | os.PathLike():
            return load_job(job)
    raise JobError(
        f"a job is the path of a job file, a mapping with the sections of one, or a Job, not {_shown(job)}; give one"
    )


def job_of_values(values: Mapping[str, Any], changes: Iterable[str] = ()) -> Job:
    """Return the job of these sections, with changes as in `load_job`. Raise JobError like it."""
    document = _document(values)
    for change in changes:
        _apply(document, change)
    return _absolute(_checked(document), Path.cwd())


def with_values(job: Job, section: str, values: Mapping[str, Any]) -> Job:
    """Return the job with other values of a section, checked like those of a file; None is none. Raise JobError."""
    given = {name: value for name, value in values.items() if value is not None}
    if not given:
        return job
    document = job.model_dump(mode="json")
    document[section] |= given
    return _checked(_document(document))


def _read(text: bytes, path: Path | None = None) -> Document:
    try:
        return strict_yaml.read(text)
    except NotYaml as error:
        raise _error(path, [error.mistake]) from error


def _document(values: Mapping[str, Any]) -> Document:
    """Return values of a program as the document of a file. Raise JobError for what no file can hold."""
    try:
        # Through JSON, so that values of a program are checked exactly as those of a file.
        value = json.loads(json.dumps(dict(values), default=_plain))
        places = dict(_places(value, ()))
    except (TypeError, ValueError, RecursionError) as error:
        raise JobError(f"the job cannot be read: {error}; give texts, numbers, lists and mappings") from error
    if nulls := [place for place, each in places.items() if isinstance(each, str) and "\0" in each]:
        # The system's calls raise ValueError for such a path.
        raise JobError(f"the job: {dotted(nulls[0])}: holds a null character (\\0); remove it")
    return Document(value=value, lines=dict.fromkeys(places, _NO_LINE))


def _plain(value: object) -> object:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{_shown(value)} is not a value of a job")


def _places(value: object, place: Place) -> Iterable[tuple[Place, object]]:
    yield place, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for part, inner in items:
        yield from _places(inner, (*place, part))


def _checked(document: Document, path: Path | None = None) -> Job:
    """Return the job of a document, which may come from a file. Raise JobError with every mistake."""
    try:
        # JSON mode: strict about numbers and booleans, while lists may become tuples and texts may become paths.
        job = Job.model_validate_json(json.dumps(document.value), strict=True)
    except ValidationError as error:
        faults = [
            each for each in error.errors() if each["type"] != "too_short" or not each["input"]
        ]  # reported by another error
        raise _error(path, [*document.mistakes, *(_mistake(each, document) for each in faults)]) from error
    if document.mistakes:
        raise _error(path, document.mistakes)
    return job


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of job files."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Job.model_json_schema()}


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise JobError(f"{path}: no such file; give the path of a job file") from error
    except IsADirectoryError as error:
        raise JobError(f"{path}: is a folder; give the job file in it") from error
    except (OSError, ValueError) as error:
        raise JobError(f"{path}: cannot be read: {error}") from error
    if len(content) > _MOST_BYTES:
        raise JobError(f"{path}: larger than {_MOST_BYTES >> 10} KiB; is it a dataset instead of a job file?")
    return content


def _apply(document: Document, change: str) -> None:
    """Set one value of the document. Raise JobError for a change that cannot be made."""
    key, is_given, written = change.partition("=")
    if not is_given or not _KEY.fullmatch(key):
        raise JobError(f"--set {_shown(change)}: give KEY=VALUE with a key of the job, such as training.epochs=2")
    try:
        value = strict_yaml.read(written.encode(errors="surrogateescape"))
    except NotYaml as error:
        raise JobError(f"--set {key}: the value is not valid YAML: {error.mistake.text}; quote it") from error
    if value.mistakes:
        raise JobError(f"--set {key}: {value.mistakes[0].text}")
    place: Place = tuple(int(part) if part.isdigit() else part for part in _KEY_PART.findall(key))
    # Of a single key it may come from a variable of a script that is not set, so that the default would surprise.
    _set(document, place, {} if value.value is None and _is_section(place) else value.value)
    replaced = [known for known in document.lines if known[: len(place)] == place]
    for known in replaced:
        del document.lines[known]
    document.lines |= {(*place, *inner): _NO_LINE for inner in value.lines} | {place: _NO_LINE}


def _is_section(place: Place) -> bool:
    """Return whether the key at `place` is that of a section; False for one that no job has."""
    with suppress(KeyError, AttributeError):  # AttributeError: a key inside of a value
        kind = _section(place[:-1]).model_fields[str(place[-1])].annotation
        return isinstance(kind, type) and issubclass(kind, BaseModel)
    return False


def _set(document: Document, place: Place, value: object) -> None:
    """Set the value at `place`; sections on the way to it that the document lacks are added."""
    document.value = {} if document.value is None else document.value
    holder: Any = document.value
    for number, part in enumerate(place):
        at, is_last = place[: number + 1], number + 1 == len(place)
        if isinstance(part, int):
            count = len(holder) if isinstance(holder, list) else 0
            if part >= count:
                raise JobError(f"--set {dotted(place)}: {dotted(at[:-1])} has {count} entries, counted from 0")
        elif not isinstance(holder, dict):
            raise JobError(f"--set {dotted(place)}: {dotted(at[:-1])} is not a section, so it has no key {part!r}")
        elif holder.get(part) is None and not is_last:
            holder[part] = {}
            document.lines[at] = _NO_LINE
        if is_last:
            holder[part] = value
        holder = holder[part]


def _error(path: Path | None, mistakes: list[Mistake]) -> JobError:
    """Return the error of a file, or of what is in memory alone where there is no path."""
    ordered = sorted(mistakes, key=lambda mistake: mistake.line)
    given = "--set " if path else "the job: "
    return JobError(
        "\n".join(
            f"{path}, {mistake}" if path and mistake.line != _NO_LINE else f"{given}{mistake.text}"
            for mistake in ordered
        )
    )


def _mistake(error: ErrorDetails, document: Document) -> Mistake:
    place = _place(error, document)
    return Mistake(line=document.line(place), text=f"{dotted(place)}: {_text(error, place)}")


def _place(error: ErrorDetails, document: Document) -> Place:
    """Return the value's place in the file, without the branches of unions that pydantic adds."""
    place: Place = ()
    for part in error["loc"]:
        if (*place, part) in document.lines:
            place = (*place, part)
    return (*place, error["loc"][-1]) if error["type"] == "missing" else place


def _text(error: ErrorDetails, place: Place) -> str:
    kind = error["type"]
    if kind == "extra_forbidden":
        key, known = str(place[-1]), list(_section(place[:-1]).model_fields)
        meant = difflib.get_close_matches(key, known, n=1)
        if not meant and len(place) == 1:  # the key of a section, on the top level
            meant = [f"{name}.{key}" for name in known if key in getattr(_section((name,)), "model_fields", ())]
        hint = f"did you mean {' or '.join(meant)}? " if meant else ""
        return f"unknown key; {hint}known here: {', '.join(known)}"
    if kind == "missing" and isinstance(place[-1], int):
        return "missing; add this entry to the list"
    if kind == "missing":
        meaning = _section(place[:-1]).model_fields[str(place[-1])].description
        return f"missing; add it{f' ({meaning})' if meaning else ''}"
    if kind == "value_error":
        return str(error["ctx"]["error"])
    if kind == "json_invalid":
        return "contains half of a surrogate pair, which is not a character; remove it"
    if kind == "too_long":
        expected = f"a list of {error['ctx']['max_length']} entries at most"
    elif kind == "model_type":
        expected = f"a section with the keys {', '.join(_section(place).model_fields)}"
    else:
        expected = _EXPECTED.get(kind, error["msg"].removeprefix("Input should be "))
    return f"must be {expected}, not {_shown(error['input'])}"


def _section(place: Place) -> type[BaseModel]:
    """Return the class of the job's part at `place`, ignoring positions in lists."""
    section: Any = Job
    for key in place:
        if isinstance(key, str):
            kind = section.model_fields[key].annotation
            while get_args(kind):  # of a list, or of a key that may be absent
                kind = get_args(kind)[0]
            section = kind
    return cast(type[BaseModel], section)


def _shown(value: object) -> str:
    """Return a value for a message; URLs, which may hold a password, are not shown."""
    match value:
        case None:
            return "empty"
        case bool():
            return str(value).lower()
        case dict():
            return "a section"
        case list():
            return "a list"
        case str() if "://" in value:
            return "a URL"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _absolute(job: Job, folder: Path) -> Job:
    sources = _absolute_sources(job.data.sources, folder)
    evaluated = job.evaluation.sources and _absolute_sources(job.evaluation.sources, folder)
    model = str(_inside(folder, job.model.path))
    hostfile = job.hardware.hostfile and _inside(folder, job.hardware.hostfile)
    found = os.path.isdir(model)  # noqa: PTH112 - false, not an error, for what cannot be a path
    return job.model_copy(
        update={
            "model": job.model.model_copy(update={"path": model if found else folder_of(job.model.path)}),
            "data": job.data.model_copy(update={"sources": sources}),
            "evaluation": job.evaluation.model_copy(update={"sources": evaluated}),
            "hardware": job.hardware.model_copy(update={"hostfile": hostfile}),
            "search": job.search.model_copy(
                update={
                    "current_plan": job.search.current_plan and _inside(folder, job.search.current_plan),
                    "queue": tuple(_inside(folder, each) for each in job.search.queue),
                    "sampler": _absolute_sampler(job.search.sampler, folder),
                }
            ),
            "training": job.training.model_copy(update={"output": _inside(folder, job.training.output)}),
        }
    )


def _absolute_sources(sources: tuple[Source, ...], folder: Path) -> tuple[Source, ...]:
    return tuple(
        source.model_copy(
            update={"path": _inside(folder, source.path), "images": source.images and _inside(folder, source.images)}
        )
        for source in sources
    )


def _absolute_sampler(sampler: str, folder: Path) -> str:
    """Return the name of the sampler, with an absolute path where it names a registry of OptunaHub."""
    name, is_local, registry = sampler.partition("@")
    return f"{name}@{_inside(folder, registry)}" if is_local else sampler


def _inside(folder: Path, path: Path | str) -> Path:
    return folder / os.path.expanduser(path)  # noqa: PTH111 - leaves `~nobody` alone instead of raising
