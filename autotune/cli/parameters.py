"""Options, arguments and kinds of groups from which the commands are built."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.context import guarded
from trials.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from autotune.job_file import JobFile


_WHOLE = 1000
"""Characters of a description, which is not cut."""


class DefaultGroup(click.Group):
    """A group that runs its command `list` unless another one is named: `autotune studies NAME` lists NAME.

    A study whose name is that of a command is shown with `autotune studies list NAME`.
    """

    default = "list"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = [self.default, *args]
        return super().parse_args(ctx, args)


class WorkflowGroup(click.Group):
    """A group whose help has the commands in the order in which a user needs them, with whole descriptions."""

    sections: Mapping[str, Sequence[str]] = {
        "Start": ("init", "recommend", "doctor", "pack"),
        "Search": ("tune", "profile", "predict"),
        "Train": ("launch", "run", "export"),
        "Look up": ("plans", "show", "compare", "studies", "report"),
        "Share and keep": ("db", "note", "tag"),
        "Set up": ("mcp", "node", "schema", "completion"),
    }

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in self.sections.items():
            with formatter.section(title):
                rows = [(name, self.commands[name].get_short_help_str(_WHOLE)) for name in names]
                formatter.write_dl(rows)


class Time(click.ParamType[str]):
    """A time with its unit, as in the job file, which stays a text."""

    name = "time"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            seconds = parse_seconds(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if seconds <= 0:
            self.fail(f"{value!r} leaves no time; give more than 0s", param, ctx)
        return value


class Size(click.ParamType[int]):
    """An amount of memory with its unit, as in the job file."""

    name = "size"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            size = parse_bytes(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if size <= 0:
            self.fail(f"{value!r} is not a limit; give more than 0B", param, ctx)
        return size


class Count(click.IntRange):
    """A whole number of things."""

    name = "integer"  # what messages and help call it

    def __init__(self, least: int, most: int | None = None) -> None:
        super().__init__(min=least, max=most)


SIZE, SIZE_OR_NONE = (Count(least, 2**31 - 1) for least in (1, 0))


def _job_file(ctx: click.Context, _: click.Parameter, path: Path | None) -> "JobFile | None":
    """Return the job file with the values of `--set`, which click reads first."""
    changes = ctx.meta[_CHANGES]
    if path is None:
        if changes:
            raise click.UsageError("--set replaces values of a job file; name one", ctx)
        return None
    from autotune.job_file import JobFile

    return JobFile(path=path, changes=changes)


def _keep_changes(ctx: click.Context, _: click.Parameter, changes: tuple[str, ...]) -> None:
    ctx.meta[_CHANGES] = changes


_CHANGES = f"{__name__}.changes"
# click does not check that the file exists: the message of `load_job` names the remedy.
JOB_PATH: dict[str, Any] = {"type": click.Path(path_type=Path), "callback": _job_file}
JOB = click.argument("job", **JOB_PATH)
SET = click.option(
    "--set",
    metavar="KEY=VALUE",
    multiple=True,
    is_eager=True,
    expose_value=False,
    callback=_keep_changes,
    help="Replace a value of the job file, such as training.epochs=2; may be given several times.",
)
LAUNCHER = click.option(
    "--launcher",
    metavar="NAME",
    help="Tool that starts the ranks: local, torchrun, deepspeed or slurm. Default: the job's.",
)
RETUNE = click.option(
    "--retune-on-drift",
    is_flag=True,
    help="When the training is slower than promised for long, tune again at its next checkpoint and go on.",
)
SUBMIT = click.option("--submit", is_flag=True, help="Submit this command to Slurm, on hardware.nodes whole nodes.")


def with_common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that may be given before or after the name of every command."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else."),
        click.option(
            "--db", metavar="URL", help="Database URL. Default: AUTOTUNE_DB_URL, else the job's, else your data folder."
        ),
        click.option("-v", "--verbose", count=True, help="Show more messages; -vv shows all."),
        click.option("-q", "--quiet", is_flag=True, help="Show errors and the result only."),
    ):
        command = option(command)
    return command


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add what every command has: the common options, and messages and exit codes instead of tracebacks."""
    return guarded(with_common_options(command), starts_ranks=False)


def common_with_ranks(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the same to a command that starts ranks."""
    return guarded(with_common_options(command), starts_ranks=True)


DEVICES = click.option("--devices", type=Count(1), help="Ranks to predict for. Default: the job's.")
MEMORY = click.option(
    "--memory",
    "memory_limit_bytes",
    type=Size(),
    metavar="SIZE",
    help="Memory limit per rank, such as 80GiB. Default: the job's.",
)
DEVICE_PROFILE = click.option(
    "--device-profile", metavar="NAME|FILE", help="Part of a device name, or a profile file. Default: this machine."
)
