"""What the documentation names exists, and what exists is in it."""

import json
import re
import shlex
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from autotune import errors
from autotune.cli import main
from autotune.cli.context import Terminated
from autotune.job_file import load_job
from storage.errors import StorageError
from trials import strict_yaml
from trials.errors import TrialsError
from trials.job import Job

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = (README, *sorted((ROOT / "docs").rglob("*.md")))
EXAMPLE_JOB = ROOT / "examples" / "tiny-internvl" / "job.yaml"
SOURCES = "data.sources[]."
PATH = re.compile(r"(?<![\w/])(?:autotune|storage|trials|tests|examples|docs|constraints)/[\w./-]*\w")
MODULE = re.compile(r"\b(?:storage|trials)(?:\.[a-z_]+)+\b")
documents = pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)


def spans(document: Path) -> list[str]:
    """Inline code of a document."""
    text = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def blocks(document: Path) -> str:
    return "\n".join(re.findall(r"^```\w*\n(.*?)^```", document.read_text(), flags=re.MULTILINE | re.DOTALL))


def rows(document: Path, *header: str) -> list[list[str]]:
    """The cells of every table with this header."""
    lines = document.read_text().splitlines()
    start = f"| {' | '.join(header)} |"
    found: list[list[str]] = []
    for number in (number for number, line in enumerate(lines) if line == start):
        for line in lines[number + 2 :]:
            if not line.startswith("|"):
                break
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def options_of(command: click.Command) -> set[str]:
    parameters = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return {"-h", "--help"}.union(*({*option.opts, *option.secondary_opts} for option in parameters))


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
    """Default by key, as the table of the job file has it."""
    return {key.strip("`"): default.strip("`") for key, default, _ in rows(README, "key", "default", "meaning")}


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


def subclasses(kind: type[Exception]) -> set[type[Exception]]:
    return {kind}.union(*(subclasses(inner) for inner in kind.__subclasses__()))


# --- commands ---


def commands(group: click.Group = main, prefix: str = "") -> dict[str, click.Command]:
    """Every command, those of groups with the group's name before theirs."""
    found: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        found |= commands(command, f"{prefix}{name} ") if isinstance(command, click.Group) else {prefix + name: command}
    return found


def split(words: list[str]) -> tuple[str, list[str]]:
    """(the command that a line begins with, the rest of the line)."""
    length = 2 if isinstance(main.commands.get(words[0]), click.Group) else 1
    return " ".join(words[:length]), words[length:]


def test_the_readme_lists_every_command_with_its_own_options() -> None:
    listed = {split(row[0].strip("`").split()[1:])[0]: set(re.findall(r"`([^`]+)`", row[2])) for row in _command_rows()}
    common = set.intersection(*map(options_of, commands().values()))
    assert listed == {name: options_of(command) - common for name, command in commands().items()}


def test_the_readme_names_the_arguments_of_each_command() -> None:
    for usage, *_ in _command_rows():
        name, arguments = split(usage.strip("`").split()[1:])
        parameters = [each for each in commands()[name].params if isinstance(each, click.Argument)]
        names = [each.human_readable_name.upper() for each in parameters]
        assert arguments == [
            name if each.required else f"[{name}]" for name, each in zip(names, parameters, strict=True)
        ]


def test_the_readme_names_the_options_that_all_commands_share() -> None:
    sentence = README.read_text().partition("Every command takes")[2].partition("stderr")[0]
    named = set(re.findall(r"`(-[\w-]+)`", sentence))
    own = {option for *_, options in _command_rows() for option in re.findall(r"`([^`]+)`", options)}
    for command in commands().values():
        given = (set(p.opts) for p in command.params if isinstance(p, click.Option))
        assert named <= options_of(command)
        assert all(options & (named | own) for options in given)


@documents
def test_command_lines_in_the_documents_are_valid(document: Path) -> None:
    lines = re.findall(r"^(?:\$ )?autotune (.+)$", blocks(document), flags=re.MULTILINE)
    lines += [span.removeprefix("autotune ") for span in spans(document) if span.startswith("autotune ")]
    for line in lines:
        words = shlex.split(line, comments=True)
        is_option = words[0].startswith("-")
        known = options_of(main) if is_option else options_of(commands()[split(words)[0]])
        assert {word for word in words if word.startswith("-")} <= known, line


@documents
def test_make_targets_in_the_documents_exist(document: Path) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = re.findall(r"^make (\w+)$", blocks(document), flags=re.MULTILINE)
    named += [span.split()[1] for span in spans(document) if span.startswith("make ")]
    assert set(named) <= targets


def test_the_readme_tells_every_exit_code() -> None:
    kinds = set().union(*(subclasses(base) for base in (errors.AutotuneError, StorageError, TrialsError)))
    codes = {errors.exit_code(kind()) for kind in kinds} | {0, Terminated(signal.SIGINT).exit_code}
    assert {int(row[0]) for row in rows(README, "exit code", "meaning")} == codes


def _command_rows() -> list[list[str]]:
    return rows(README, "command", "what it does", "options")


# --- the job file ---


def test_the_readme_lists_every_key_of_the_job_file_once() -> None:
    keys = [row[0].strip("`") for row in rows(README, "key", "default", "meaning")]
    assert sorted(keys) == sorted(key for key, _ in fields())


def test_the_readme_tells_which_keys_are_required_and_which_may_be_absent() -> None:
    documented = documented_defaults()
    assert {key for key in documented if documented[key] == "required"} == {
        key for key, field in fields() if field.is_required()
    }
    assert {key for key in documented if documented[key] == "absent"} == {
        key for key, field in fields() if not field.is_required() and field.default is None
    }


def test_the_readmes_defaults_are_the_jobs(tmp_path: Path) -> None:
    documented = documented_defaults().items()
    values = {
        key: strict_yaml.read(text.encode()).value for key, text in documented if text not in ("required", "absent")
    }
    assert load(tmp_path / "job.yaml", values.items()) == load(tmp_path / "job.yaml", ())


def test_the_example_job_can_be_loaded() -> None:
    job = load_job(EXAMPLE_JOB)
    assert job.data.sources[0].path == EXAMPLE_JOB.parent / "data" / "train.jsonl"


# --- files and names ---


@documents
def test_files_and_modules_that_the_documents_name_exist(document: Path) -> None:
    code = "\n".join((*spans(document), blocks(document)))
    modules = [f"{name.replace('.', '/')}.py" for name in MODULE.findall(code)]
    missing = {name for name in (*PATH.findall(code), *modules) if not (ROOT / name).exists()}
    assert not missing


@documents
def test_links_lead_to_files(document: Path) -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), target


@documents
def test_names_that_stand_beside_a_file_stand_in_it(document: Path) -> None:
    for file, names, _ in rows(document, "file", "functions", "what happens"):
        source = (ROOT / file.strip("`")).read_text()
        for name in re.findall(r"\w+", names):
            assert re.search(rf"\b(def|class) {name}\b|^{name} =", source, flags=re.MULTILINE), f"{file}: {name}"


@documents
def test_documents_are_plain_text(document: Path) -> None:
    assert document.read_text().isascii()
