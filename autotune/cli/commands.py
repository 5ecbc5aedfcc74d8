"""One function per command, each over a library function; results on stdout, progress on stderr."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.context import Options, guarded
from autotune.cli.default_group import DefaultGroup
from trials import plugins
from trials.data.packers import PACKERS
from trials.units import parse_bytes, parse_seconds

if TYPE_CHECKING:
    from autotune.job_file import JobFile


class _Time(click.ParamType[float]):
    """A time with its unit, as in the job file."""

    name = "time"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            seconds = parse_seconds(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if seconds <= 0:
            self.fail(f"{value!r} leaves no time to search; give more than 0s", param, ctx)
        return seconds


class _Size(click.ParamType[int]):
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


_SIZE, _SIZE_OR_NONE = (click.IntRange(min=least, max=2**31 - 1) for least in (1, 0))


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
_JOB_PATH: dict[str, Any] = {"type": click.Path(path_type=Path), "callback": _job_file}
_JOB = click.argument("job", **_JOB_PATH)
_SET = click.option(
    "--set",
    metavar="KEY=VALUE",
    multiple=True,
    is_eager=True,
    expose_value=False,
    callback=_keep_changes,
    help="Replace a value of the job file, such as training.epochs=2; may be given several times.",
)


def _with_common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that stand before or behind the name of every command."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout and nothing else."),
        click.option(
            "--db", metavar="URL", help="Database URL. Default: AUTOTUNE_DB_URL, else the job's, else your data folder."
        ),
        click.option("-v", "--verbose", count=True, help="Show more messages; -vv shows all."),
        click.option("-q", "--quiet", is_flag=True, help="Show errors only."),
    ):
        command = option(command)
    return command


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    return guarded(_with_common_options(command))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="vlm-autotune", prog_name="autotune")
@_with_common_options
def main(**_: Any) -> None:
    """Find the fastest plan to train a vision-language model on this hardware, and train with it."""


@main.command()
@_JOB
@_SET
@click.option("--trials", type=click.IntRange(min=1), help="Most trials to run; overrides the job.")
@click.option(
    "--time-limit", type=_Time(), metavar="TIME", help="Most time to search, such as 20min; overrides the job."
)
@click.option("--resume/--fresh", "resume", default=True, help="Use stored results, or measure everything again.")
@_common
def tune(options: Options, job: "JobFile", trials: int | None, time_limit: float | None, resume: bool) -> None:
    """Search the best plan for JOB with short, real training steps."""
    from autotune.cli.work import tune_job

    tune_job(options, job, trials=trials, time_limit=time_limit, fresh=not resume)


@main.command()
@_JOB
@_SET
@click.option("--plan", metavar="ID", help="ID of a tried plan to train with. Default: the winner.")
@click.option(
    "--resume-with", metavar="ID", help="ID of a tried plan that goes on with the training instead of its own."
)
@click.option("--steps", type=click.IntRange(min=1), help="Stop, with a checkpoint, after this many steps in all.")
@click.option("--dry-run", is_flag=True, help="Print the commands of the ranks without starting them.")
@click.option("--certify", is_flag=True, help="First compare a step's gradients with the plain model; refuse if wrong.")
@_common
def launch(options: Options, job: "JobFile", **wanted: Any) -> None:
    """Run the full training of JOB with its best plan."""
    from autotune.cli.work import LaunchOptions, launch_job

    if wanted["resume_with"] and (wanted["plan"] or wanted["dry_run"]):
        raise click.UsageError(
            "--resume-with names the plan and changes the training; give it without --plan, --dry-run"
        )
    launch_job(options, job, LaunchOptions(**wanted))


@main.command()
@_JOB
@_SET
@_common
def run(options: Options, job: "JobFile") -> None:
    """Tune JOB if no valid plan is known, then launch it."""
    from autotune.cli.work import run_job

    run_job(options, job)


@main.command()
@_JOB
@_SET
@click.option("--out", type=click.Path(path_type=Path), help="Write the costs to this .json file.")
@click.option("--fresh", is_flag=True, help="Measure again even if a profile is stored.")
@_common
def profile(options: Options, job: "JobFile", out: Path | None, fresh: bool) -> None:
    """Time each kind of layer of JOB's model alone, and store its costs for predictions."""
    from autotune.cli.layer_profile import profile_job

    profile_job(options, job, out=out, fresh=fresh)


@main.command()
@_JOB
@_SET
@click.option(
    "--plan",
    metavar="FILE|ID",
    help="Plan file (YAML or JSON) or ID of a tried plan. Default: the best plans that the solver finds.",
)
@click.option("--devices", type=click.IntRange(min=1), help="Ranks to predict for. Default: the job's.")
@click.option(
    "--memory",
    "memory_limit_bytes",
    type=_Size(),
    metavar="SIZE",
    help="Memory limit per rank, such as 80GiB. Default: the job's.",
)
@click.option(
    "--device-profile", metavar="NAME|FILE", help="Part of a device name, or a profile file. Default: this machine."
)
@click.option("--top", type=_SIZE, default=5, help="Number of plans to show, best first; with --plan only that one.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw a typical step into this .png, .svg or .pdf file.")
@_common
def predict(options: Options, job: "JobFile", plan: str | None, top: int, plot: Path | None, **wishes: Any) -> None:
    """Predict how fast plans for JOB are, here or on other devices, without running them."""
    from autotune.cli.predict import predict_job
    from autotune.forecast.cluster import ClusterOptions

    predict_job(options, job, ClusterOptions(**wishes), plan=plan, top=top, picture=plot)


@main.command()
@click.argument("job", metavar="INPUT", **_JOB_PATH)
@_SET
@click.option("--qv", type=_SIZE_OR_NONE, help="Most vision units of a pack. Default: chosen for the data.")
@click.option("--qt", type=_SIZE, help="Most text tokens of a pack. Default: chosen for the data.")
@click.option("--qv-min", type=_SIZE_OR_NONE, help="Vision units that fill a pack. Default: qv.")
@click.option("--qt-min", type=_SIZE_OR_NONE, help="Text tokens that fill a pack. Default: qt - 128.")
@click.option("--packer", metavar="NAME", help=f"{', '.join(plugins.names(PACKERS))} or best. Default: best, by cost.")
@click.option(
    "--data-parallel",
    type=click.IntRange(min=1, max=1 << 16),
    help="Number of data-parallel ranks. Default: the job's, or 8.",
)
@click.option("--global-batch", type=_SIZE, help="Samples of a step. Default: the job's, or 128.")
@click.option(
    "--seed", type=click.IntRange(min=0, max=2**31 - 1), help="Seed of order and packs. Default: the job's, or 0."
)
@click.option("--epoch", type=_SIZE_OR_NONE, default=0, help="Number of the epoch, counted from 0.")
@click.option(
    "--oversize",
    type=click.Choice(["own-pack", "truncate", "skip", "fail"]),
    help="What to do with a sample above qv or qt. Default: the job's, or own-pack.",
)
@click.option("--model", metavar="PATH", help="Model whose cost weighs a file of lengths. Default: OmniBal's.")
@click.option("--out", type=click.Path(path_type=Path), help="Write the packs to this .jsonl or .parquet file.")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw before and after into this .png, .svg or .pdf file."
)
@_common
def pack(
    options: Options, job: "JobFile", global_batch: int | None, out: Path | None, plot: Path | None, **wanted: Any
) -> None:
    """Pack INPUT, a job's data or a file of lengths, and show how balanced it is before and after."""
    from autotune.cli.data import pack_data
    from autotune.packing.material import PackOptions

    packing = PackOptions(global_batch_samples=global_batch, **wanted)
    pack_data(options, job, packing, out=out, picture=plot)


@main.command()
@click.option("--here", is_flag=True, help="Only plans that hold on this machine, or else the nearest.")
@click.option(
    "--like",
    metavar="JOB",
    **_JOB_PATH,
    help="Only plans that hold for JOB on this machine, or else the nearest.",
)
@click.option("--hardware", metavar="NAME", help="Only plans for devices with NAME in their name.")
@click.option("--model", metavar="NAME", help="Only plans for models with NAME in their name.")
@click.option("--verdict", type=click.Choice(["valid", "re-measure", "invalid"]), help="Only plans with this verdict.")
@click.option("--in-use", is_flag=True, help="Only plans that a running training uses.")
@click.option("--tag", metavar="TAG", help="Only plans with this tag.")
@click.option("--archived", is_flag=True, help="List plans of archived studies too.")
@click.option(
    "--sort",
    type=click.Choice(["speed", "gain", "found", "distance"]),
    help="Order. Default: nearest first with --here or --like, else latest search first.",
)
@click.option("--top", type=_SIZE, help="Show at most this many.")
@_SET
@_common
def plans(options: Options, **wanted: Any) -> None:
    """List the stored winners, and whether they hold on this machine."""
    from autotune.cli.query import PlanFilter, list_plans

    list_plans(options, PlanFilter(**wanted))


@main.group(cls=DefaultGroup)
def studies() -> None:
    """List studies, or show, delete or archive some. Without a command: `studies list`."""


@studies.command(name="list")
@click.argument("study", required=False)
@click.option("--model", metavar="NAME", help="Only studies of models with NAME in their name.")
@click.option("--tag", metavar="TAG", help="Only studies with this tag.")
@click.option("--archived", is_flag=True, help="List archived studies too.")
@click.option("--top", type=_SIZE, help="Show at most this many.")
@_common
def list_(options: Options, study: str | None, **wanted: Any) -> None:
    """List the stored studies, or show every trial and the winner of STUDY."""
    from autotune.cli.studies import list_studies, show_study

    if study is None:
        list_studies(options, **wanted)
    else:
        show_study(options, study)


_STUDIES = click.argument("names", metavar="STUDY...", nargs=-1, required=True)


@studies.command()
@_STUDIES
@click.option("--yes", is_flag=True, help="Do not ask.")
@_common
def delete(options: Options, names: tuple[str, ...], yes: bool) -> None:
    """Delete each STUDY with its trials, its winner, and the plans that no other study tried."""
    from autotune.cli.studies import delete_studies

    delete_studies(options, names, is_confirmed=yes)


@studies.command()
@_STUDIES
@_common
def archive(options: Options, names: tuple[str, ...]) -> None:
    """Hide each STUDY: it is not listed, and searches and launches use it only by name."""
    from autotune.cli.studies import archive_studies

    archive_studies(options, names, is_undone=False)


@studies.command()
@_STUDIES
@_common
def unarchive(options: Options, names: tuple[str, ...]) -> None:
    """Undo `studies archive`."""
    from autotune.cli.studies import archive_studies

    archive_studies(options, names, is_undone=True)


_SUBJECT = click.argument("name")


@main.command()
@_SUBJECT
@click.argument("text", required=False)
@click.option("--remove", is_flag=True, help="Remove the note.")
@_common
def note(options: Options, name: str, text: str | None, remove: bool) -> None:
    """Set the note of the study or plan NAME to TEXT, or show it."""
    from autotune.cli import annotations

    annotations.note(options, name, text, is_removed=remove)


@main.command()
@_SUBJECT
@click.argument("tags", metavar="TAG...", nargs=-1)
@click.option("--remove", metavar="TAG", multiple=True, help="Remove this tag; may be given several times.")
@_common
def tag(options: Options, name: str, tags: tuple[str, ...], remove: tuple[str, ...]) -> None:
    """Add each TAG to the study or plan NAME, remove some, or show its tags."""
    from autotune.cli import annotations

    annotations.tag(options, name, tags, remove)


@main.command()
@click.argument("plan")
@_common
def show(options: Options, plan: str) -> None:
    """Show a tried PLAN: its measurements, how certain they are, and whether it is valid here."""
    from autotune.cli.query import show_plan

    show_plan(options, plan)


@main.command()
@click.argument("job", required=False, **_JOB_PATH)
@_SET
@_common
def doctor(options: Options, job: "JobFile | None") -> None:
    """Report on hardware, software and database, on problems to solve, and on the data of JOB."""
    from autotune.cli.doctor import examine

    examine(options, job)


@main.command()
@_common
def schema(options: Options) -> None:
    """Print the JSON Schema of the job file, with which editors complete and check it."""
    import json

    from autotune.job_file import json_schema

    options.give(json_schema, lambda: json.dumps(json_schema(), indent=2))


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@_common
def completion(options: Options, shell: str) -> None:
    """Print the script that completes commands and options in SHELL."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells of the argument"
    script = kind(main, {}, "autotune", "_AUTOTUNE_COMPLETE").source()
    options.give(lambda: {"script": script}, lambda: script)


@main.group()
def db() -> None:
    """Upgrade, check, repair, vacuum and share the database."""


@db.command()
@_common
def upgrade(options: Options) -> None:
    """Create the tables, or bring older ones to this version after a backup."""
    from autotune.cli.database import upgrade_database

    upgrade_database(options)


@db.command()
@_common
def check(options: Options) -> None:
    """Verify every row, reference and page of the database; exit with 1 if anything is wrong."""
    from autotune.cli.database import check_database

    check_database(options)


@db.command()
@_common
def repair(options: Options) -> None:
    """Copy the database, then save what can be read and drop rows that contradict themselves."""
    from autotune.cli.database import repair_database

    repair_database(options)


@db.command()
@_common
def vacuum(options: Options) -> None:
    """Give the space of deleted rows back."""
    from autotune.cli.database import vacuum_database

    vacuum_database(options)


@db.command()
@click.option(
    "--study", "studies", metavar="STUDY", multiple=True, help="A finished study; may be given several times."
)
@click.option("--hardware", metavar="NAME", help="Every finished study on devices with NAME in their name.")
@click.option("--out", type=click.Path(path_type=Path), help="Write to this .jsonl file. Default: stdout.")
@_common
def export(options: Options, studies: tuple[str, ...], hardware: str | None, out: Path | None) -> None:
    """Write finished studies, with all that was measured, as a bundle for another database."""
    from autotune.cli.database import export_bundle

    export_bundle(options, studies, hardware=hardware, out=out)


@db.command(name="import")
@click.argument("bundle", type=click.Path(path_type=Path))
@_common
def import_(options: Options, bundle: Path) -> None:
    """Import a BUNDLE that `autotune db export` wrote; its plans count as measured elsewhere."""
    from autotune.cli.database import import_bundle

    import_bundle(options, bundle)
