"""Commands as tools: the schema of their arguments, the command line of a call, and its result as JSON values."""

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.assistants.provenance import answer
from autotune.cli.context import Options, warnings_kept
from autotune.cli.display.display import Display
from trials.errors import AutotuneError

if TYPE_CHECKING:
    from autotune.events import Event

_COMMON = ("as_json", "db", "verbose", "quiet")
_WRITE = ("out", "plot")
"""Parameters that name files to write."""
_REFUSED_SETTINGS = {
    "model.trust_remote_code": "would run code of a model's folder",
    "model": "may run code of a model's folder",
    "database": "would open another database, and may upgrade its tables",
}
"""Keys of a job that an assistant may not set where runs are not allowed, and what each would do."""
_ARGUMENTS = {
    "data": "Annotation files or folders; none where a job file stands in place of the model.",
    "first": "Id of a plan, or its beginning; PLAN@STUDY chooses a study, and a STUDY alone means its winner.",
    "job": "Path of a job file; for `pack`, a file of lengths as well.",
    "model": "Folder of a model, or its id in the hub; for `recommend`, a job file as well, without data.",
    "study": "Name or id of a study, or its beginning.",
}
_ARGUMENTS["second"] = _ARGUMENTS["plan"] = _ARGUMENTS["first"]


def check_settings(changes: Iterable[str]) -> None:
    """Raise AutotuneError for a value of `set` that makes a look-up run code or open another database."""
    # Only these spellings reach the keys: a change has plain words with dots.
    for key in (change.partition("=")[0] for change in changes):
        if key in _REFUSED_SETTINGS:
            raise AutotuneError(
                f"set {key} {_REFUSED_SETTINGS[key]}, and this server was started without --allow-runs; "
                f"{'set model.path and other keys one by one, or ' if key == 'model' else ''}ask the user to write it "
                "into the job file, or to start the server as `autotune mcp --allow-runs`"
            )


def _check_trust(values: Iterable[object]) -> None:
    """Raise AutotuneError for a job file that trusts the code of its model's folder, in place of which one is set."""
    from autotune.job_file import JobFile

    for file in (each for each in values if isinstance(each, JobFile)):
        if any(change.startswith("model.path=") for change in file.changes) and file.job.model.trust_remote_code:
            raise AutotuneError(
                f"set model.path would run code of {file.job.model.path}: {file.path} sets model.trust_remote_code for "
                "another folder, and this server was started without --allow-runs; ask the user to write the path into "
                "a job file, or to start the server as `autotune mcp --allow-runs`"
            )


class Heard(Display):
    """Display that passes on what is done now, and keeps what lasts."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(quiet=True)
        self.notes: list[str] = []
        self._tell = tell

    def __call__(self, event: "Event", /) -> None:
        from autotune.events import Note, PhaseBegan

        if isinstance(event, Note):
            self.show(event.text)
        elif isinstance(event, PhaseBegan):
            self._tell(event.text)

    def show(self, text: str) -> None:
        self.notes.append(text)
        self._tell(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandTool:
    """A command with the arguments that an assistant may give."""

    name: str
    command: click.Command

    @property
    def description(self) -> str:
        return inspect.cleandoc(self.command.help or "")

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of the arguments."""
        parameters = self._parameters()
        return {
            "type": "object",
            "properties": {name: _schema(each) for name, each in parameters.items()},
            "required": [name for name, each in parameters.items() if each.required],
            "additionalProperties": False,
        }

    def command_line(self, given: Mapping[str, Any]) -> list[str]:
        """Return what stands behind the command's name for these arguments. Raise UsageError for impossible ones."""
        known = self._parameters()
        if unknown := [name for name in given if name not in known]:
            raise click.UsageError(f"{self.name} has no argument {unknown[0]!r}; it has {', '.join(known)}")
        places, options = list[str](), list[str]()
        for name, parameter in known.items():
            if given.get(name) is not None:
                texts = list(_texts(name, parameter, given[name]))
                (options if isinstance(parameter, click.Option) else places).extend(texts)
        return [*options, "--", *places] if any(each.startswith("-") for each in places) else [*places, *options]

    def call(
        self, line: list[str], database: str | None, tell: Callable[[str], None], *, allows_runs: bool
    ) -> dict[str, Any]:
        """Return the result of the command, where its numbers come from, and notes to it.

        `tell` is called with what is done now, from any thread. Unless it `allows_runs`, no code of a model's folder
        runs but of one whose job file says so. Raise what the command raises.
        """
        from trials.data import mixtures

        mixtures.warn.cache_clear()
        context = self.command.make_context(self.name, line)
        given = {name: value for name, value in context.params.items() if name not in _COMMON}
        if not allows_runs:
            _check_trust(given.values())
        heard = Heard(tell)
        results = list[Mapping[str, Any]]()
        options = Options(
            as_json=True, database=database, verbose=0, quiet=True, display=heard, receiver=results.append
        )
        assert self.command.callback, "all but groups have one"
        with warnings_kept() as warnings:
            try:
                context.invoke(inspect.unwrap(self.command.callback), options, **given)
            except AutotuneError as error:
                if not results:
                    raise
                warnings.append(str(error))  # `doctor` reports what it can before
        return answer(self.name, results[0], (*heard.notes, *warnings))

    def _parameters(self) -> dict[str, click.Parameter]:
        """Return the parameters by the names that assistants see: those of the command line."""
        return {
            max(each.opts, key=len).lstrip("-").replace("-", "_"): each
            for each in self.command.params
            if each.name not in (*_COMMON, *_WRITE)
        }


def _schema(parameter: click.Parameter) -> dict[str, Any]:
    about = parameter.help if isinstance(parameter, click.Option) else _ARGUMENTS[parameter.name or ""]
    kind = _kind(parameter)
    return {**({"type": "array", "items": kind} if _is_list(parameter) else kind), "description": about}


def _kind(parameter: click.Parameter) -> dict[str, Any]:
    """Return the schema of one value."""
    match parameter.type:
        case click.Choice(choices=choices):
            return {"type": "string", "enum": list(choices)}
        case click.IntRange(min=least, max=most):
            bounds = {"minimum": least, "maximum": most}
            return {"type": "integer", **{name: bound for name, bound in bounds.items() if bound is not None}}
        case click.FloatRange(min=least):
            return {"type": "number", "exclusiveMinimum": least}
    return {"type": "boolean" if _is_flag(parameter) else "string"}


def _texts(name: str, parameter: click.Parameter, value: object) -> Iterator[str]:
    """Yield the words of the command line for the value of a parameter. Raise UsageError for an impossible one."""
    values, is_flag = value if _is_list(parameter) else [value], _is_flag(parameter)
    if not isinstance(values, list) or not all(
        _is_single(each) and isinstance(each, bool) == is_flag for each in values
    ):
        expected = "a list" if _is_list(parameter) else "true or false" if is_flag else "a text or a number"
        raise click.UsageError(f"{name}: must be {expected}, not {json.dumps(value)}")
    if any("\0" in str(each) for each in values):
        raise click.UsageError(f"{name}: holds a null character (\\0); remove it")
    for each in values:
        if is_flag:
            yield from (parameter.opts if each else parameter.secondary_opts)[:1]
        else:
            yield f"{parameter.opts[0]}={each}" if isinstance(parameter, click.Option) else str(each)


def _is_single(value: object) -> bool:
    return isinstance(value, str | int | float)


def _is_flag(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Option) and parameter.is_flag


def _is_list(parameter: click.Parameter) -> bool:
    return parameter.nargs == -1 or parameter.multiple
