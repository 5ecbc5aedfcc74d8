"""Arguments of other trainers, from a configuration in JSON or YAML or from a launch script."""

import re
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from autotune.draft.shell_script import NoValue, words_of
from autotune.errors import JobError
from trials import strict_yaml
from trials.strict_yaml import NotYaml

_MOST_BYTES = 1 << 20
_SCRIPTS, _DOCUMENTS = (".sh", ".bash", ".txt"), (".json", ".yaml", ".yml")
_PROCESSES = ("nproc_per_node", "num_processes", "num_gpus")
"""Options with which torchrun, accelerate and deepspeed start processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of a trainer."""

    values: dict[str, Any]
    """Value by name, without dashes; those of a script are texts, or lists of texts."""
    words: Set[str] = frozenset()
    """Words of the command before its first option, such as `torchrun` and the names of programs."""
    devices: int | None = None
    """Processes that the command starts."""
    unknown: tuple[str, ...] = ()
    """Arguments whose values use variables that the script does not set."""


def read_arguments(path: Path) -> Arguments:
    """Return the arguments in a file. Raise JobError for a file that is neither a configuration nor a script."""
    text = _content(path)
    if path.suffix in _SCRIPTS:
        return _of_script(path, text.decode(errors="replace"))
    if path.suffix in _DOCUMENTS:
        return Arguments(values=_mapping(path, text))
    kinds = ", ".join((*_DOCUMENTS, *_SCRIPTS))
    raise JobError(f"{path}: {path.suffix or 'a name without suffix'} is not a kind of configuration; give {kinds}")


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise JobError(f"{path} cannot be read ({why}); give a configuration or a launch script") from error
    if len(content) > _MOST_BYTES:
        raise JobError(f"{path} is larger than {_MOST_BYTES >> 20} MiB; is it a configuration?")
    return content


def _mapping(path: Path, text: bytes) -> dict[str, Any]:
    try:
        document = strict_yaml.read(text)  # of which JSON is a part
    except NotYaml as error:
        raise JobError(f"{path}, {error.problem}") from error
    if document.problems:
        raise JobError("\n".join(f"{path}, {problem}" for problem in document.problems))
    if not isinstance(document.value, dict) or not document.value:
        raise JobError(f"{path}: holds no settings; give the configuration of a trainer")
    return document.value


def _of_script(path: Path, text: str) -> Arguments:
    """Return the arguments of the command with the most options. The script is read, never run."""
    try:
        commands = list(words_of(text))
    except ValueError as error:
        raise JobError(f"{path}: {error}; write the arguments into a YAML file instead") from error
    found = max((_of_command(words) for words in commands), key=lambda each: len(each.values), default=None)
    if found is None or not found.values:
        raise JobError(f"{path}: no command with options such as --learning_rate was found; give a launch script")
    return found


def _of_command(words: list[str | NoValue]) -> Arguments:
    values: dict[str, Any] = {}
    unknown: list[str] = []
    for name, given in _options(words):
        if any(isinstance(each, NoValue) for each in given):
            unknown.append(name)
            continue
        values[name] = given[0] if len(given) == 1 else given or True
    # Taken out: they belong to the launcher, not to the trainer.
    started = next((values.pop(name) for name in _PROCESSES if name in values), None)
    program = takewhile(lambda word: isinstance(word, str) and not word.startswith("-"), words)
    arguments = Arguments(values=values, words=frozenset(map(str, program)), unknown=tuple(unknown))
    is_count = isinstance(started, str) and re.fullmatch(r"[1-9]\d{0,5}", started)
    return replace(arguments, devices=int(str(started))) if is_count else arguments


def _options(words: list[str | NoValue]) -> Iterator[tuple[str, list[str | NoValue]]]:
    """Yield the name of each option with the words up to the next one."""
    name, given = None, list[str | NoValue]()
    for word in words:
        if isinstance(word, str) and re.match(r"--?[A-Za-z]", word):
            if name:
                yield name, given
            key, is_given, value = word.lstrip("-").partition("=")
            name, given = key.replace("-", "_"), []
            if is_given:
                yield name, [value]
                name = None
        else:
            given.append(word)
    if name:
        yield name, given
