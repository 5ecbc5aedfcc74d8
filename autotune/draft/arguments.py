"""Arguments of other trainers, from a configuration in JSON or YAML or from a launch script."""

import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path, PurePath
from typing import Any

from autotune.draft.shell_script import NoValue, ShellCommand, commands_of
from autotune.errors import JobError
from trials import strict_yaml
from trials.strict_yaml import NotYaml

# A choice: launch scripts have some KiB, and a data set named by mistake is refused before it is parsed.
_MOST_BYTES = 1 << 20
_SCRIPTS, _DOCUMENTS = (".sh", ".bash", ".slurm", ".sbatch", ".txt"), (".json", ".yaml", ".yml")
_STARTERS = {"srun", "torchrun", "accelerate", "deepspeed", "python", "python3", "mpirun", "bash", "sh"}
"""Programs that start the program of a trainer."""
_ALL_NODES, _EACH_NODE, _TASKS = ("num_processes",), ("nproc_per_node", "num_gpus"), ("ntasks",)
"""Options with which they say how many processes they start: a task may start several."""
_NODES = ("nnodes", "num_nodes", "nodes")
_OWN_STARTERS = {"swift": "1", "megatron": "1", "llamafactory-cli": None}
"""Programs that start NPROC_PER_NODE processes, with the number where that is not set; None for all devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The arguments of a trainer."""

    values: dict[str, Any]
    """Value by name, without dashes. Those of a script are texts, lists of texts, or NoValue."""
    words: Set[str] = frozenset()
    """Words of the command before the trainer's own options, such as `torchrun` and the names of programs."""
    devices: int | None = None
    """Processes that the command starts, on all nodes."""
    environment: Mapping[str, str | NoValue] = field(default_factory=dict)
    """Variables that the script sets."""
    exported: Set[str] = frozenset()
    """Names of those that the command gets: others are the script's own."""
    place: str = ""
    """File and line of the command in a script."""
    remarks: tuple[str, ...] = ()
    """What of the script is not followed, and what is assumed instead."""
    others: tuple["Arguments", ...] = ()
    """Those of the script's other commands."""

    @property
    def passed(self) -> dict[str, str | NoValue]:
        """The variables that the command gets."""
        return {name: value for name, value in self.environment.items() if name in self.exported}

    def starts(self, *programs: str) -> bool:
        """Return whether one of these programs is among the words, perhaps as a file or with its folder."""
        return any(PurePath(word).stem in programs for word in self.words)


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
        document = document_of(path, text)
    except NotYaml as error:
        raise JobError(f"{path}, {error.mistake}") from error
    if document.mistakes:
        raise JobError("\n".join(f"{path}, {mistake}" for mistake in document.mistakes))
    if not isinstance(document.value, dict) or not document.value:
        raise JobError(f"{path}: holds no settings; give the configuration of a trainer")
    return document.value


def document_of(path: Path, content: bytes) -> strict_yaml.Document:
    """Return the document in a file. Raise NotYaml."""
    # JSON is a part of YAML but for tabs, which are blanks there: in its strings they are escaped.
    return strict_yaml.read(content.replace(b"\t", b" ") if path.suffix == ".json" else content)


def _of_script(path: Path, text: str) -> Arguments:
    """Return the arguments of the command with the most options. The script is read, never run."""
    try:
        commands = [command for command in commands_of(text) if command.words[0] != "echo"]
    except ValueError as error:
        raise JobError(f"{path}: {error}; write the arguments into a YAML file instead") from error
    of_each = [_of_command(path, command) for command in commands]
    found = max(of_each, key=lambda each: len(each.values), default=None)
    if found is None or not found.values:
        files = [word for command in commands for word in command.words if str(word).endswith(_DOCUMENTS)]
        named = f"; it names {', '.join(map(str, files))}: give that" if files else "; give a launch script"
        raise JobError(f"{path}: no command with options such as --learning_rate was found{named}")
    return replace(found, others=tuple(each for each in of_each if each is not found))


def _of_command(path: Path, command: ShellCommand) -> Arguments:
    starting, own = _parts(command.words)
    starter, values = dict(_options(starting)), dict(map(_negated, _options(own)))
    if not starting:  # then options of both are together, as in `torchrun --nproc_per_node 8 -m MODULE`
        starter = {name: values.pop(name) for name in (*_ALL_NODES, *_EACH_NODE, *_TASKS) if name in values}
    if own and own[0] in _OWN_STARTERS:
        environment = command.variables
        each_node = environment.get("NPROC_PER_NODE", _OWN_STARTERS[str(own[0])])
        starter |= {"nproc_per_node": each_node, "nnodes": environment.get("NNODES", "1")}
    leading = takewhile(lambda word: isinstance(word, str) and not word.startswith("-"), own)
    return Arguments(
        values=values,
        words={str(word) for word in (*starting, *leading)},
        devices=_processes(starter),
        environment=command.variables,
        exported=command.exported,
        place=f"{path.name}, line {command.line}",
        remarks=tuple(_unfollowed(path, command)),
    )


def _unfollowed(path: Path, command: ShellCommand) -> Iterator[str]:
    """Yield the tests and loops on which the command depends and that only a run of the script decides."""
    for line in command.unfollowed:
        yield f"{path.name}, line {line}: a test or a loop that is not followed; its training is taken to run once"
    for line in sorted(set(command.doubts.values())):
        names = ", ".join(sorted(name for name, at in command.doubts.items() if at == line))
        yield f"{path.name}, line {line}: a test or a loop that is not followed; not known after it: {names}"


def _parts(words: tuple[str | NoValue, ...]) -> tuple[tuple[str | NoValue, ...], tuple[str | NoValue, ...]]:
    """Return the words of the programs that start the trainer, and those from the trainer's program on."""
    if words[0] not in _STARTERS:
        return (), words
    at = next((at for at, word in enumerate(words) if isinstance(word, str) and word.endswith(".py")), 0)
    return words[:at], words[at:]


def _processes(starter: Mapping[str, Any]) -> int | None:
    """Return the number of processes on all nodes, None where it is not known."""
    all_nodes, each_node, tasks, nodes = (
        next((starter[name] for name in names if name in starter), None)
        for names in (_ALL_NODES, _EACH_NODE, _TASKS, _NODES)
    )
    if all_nodes is not None or (each_node is None and tasks is not None):
        return whole_number(tasks if all_nodes is None else all_nodes)
    each, times = whole_number(each_node), 1 if nodes is None else whole_number(nodes)
    return each * times if each and times else None


def whole_number(text: object) -> int | None:
    """Return the number that a text states, None for any other value."""
    return int(text) if isinstance(text, str) and re.fullmatch(r"[1-9]\d{0,5}", text) else None


def _options(words: Iterable[str | NoValue]) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each option: True without a value, and NoValue where a part is not known."""
    name, given = None, list[str | NoValue]()
    for word in words:
        if given and isinstance(word, NoValue) and not word.start:
            yield "further arguments", word  # as of `$@` behind the last option
            continue
        text = word.start if isinstance(word, NoValue) else word
        if re.match(r"--?[A-Za-z]", text):
            if name:
                yield name, _joined(given)
            key, is_given, value = text.lstrip("-").partition("=")
            name = key.replace("-", "_")
            given = ([word] if isinstance(word, NoValue) else [value]) if is_given else []
        else:
            given.append(word)
    if name:
        yield name, _joined(given)


def _negated(option: tuple[str, Any]) -> tuple[str, Any]:
    """Return a `--no_NAME` without a value as a false NAME: so HfArgumentParser turns off what is on by default."""
    name, value = option
    return (name[3:], "false") if name.startswith("no_") and value is True else option


def _joined(given: list[str | NoValue]) -> Any:
    if unknown := next((word for word in given if isinstance(word, NoValue)), None):
        return unknown
    return given[0] if len(given) == 1 else given or True
