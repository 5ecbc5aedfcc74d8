"""One function per command, each over a library function; results on stdout, progress on stderr."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from autotune.cli.context import Options, inspect_job
from autotune.cli.database_commands import db, studies
from autotune.cli.forecast_commands import export, pack, predict, recommend
from autotune.cli.node import node
from autotune.cli.parameters import (
    JOB,
    JOB_PATH,
    LAUNCHER,
    RETUNE,
    SET,
    SIZE,
    SUBMIT,
    Count,
    Time,
    WorkflowGroup,
    common,
    common_with_ranks,
    with_common_options,
)

if TYPE_CHECKING:
    from autotune.job_file import JobFile


@click.group(cls=WorkflowGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="vlm-autotune", prog_name="autotune")
@with_common_options
def main(**_: Any) -> None:
    """Find the fastest plan to train a vision-language model on this hardware, and train with it."""


@main.command()
@click.argument("model", required=False)
@click.argument("data", metavar="[DATA...]", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--from",
    "trainer",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Configuration of another trainer: DeepSpeed JSON, LLaMA-Factory, ms-swift, TRL or axolotl YAML, or a script.",
)
@click.option("--devices", type=Count(1), help="Ranks. Default: those of FILE, else all devices here.")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("job.yaml"), show_default=True, help="File to write."
)
@common
def init(options: Options, model: str | None, data: tuple[Path, ...], **wanted: Any) -> None:
    """Write a commented job file for MODEL and DATA, or from the configuration of another trainer."""
    from autotune.cli.init import write_job

    write_job(options, model, data, **wanted)


@main.command()
@JOB
@SET
@click.option("--trials", type=Count(1), help="Most trials to run; overrides the job.")
@click.option(
    "--time-limit", type=Time(), metavar="TIME", help="Most time to search, such as 20min; overrides the job."
)
@click.option(
    "--for",
    "trainer",
    metavar="TRAINER",
    help="Search only plans that `autotune export JOB --to TRAINER` writes as they are, such as ms-swift.",
)
@click.option("--fresh", is_flag=True, help="Measure every plan again, and use no stored result.")
@LAUNCHER
@SUBMIT
@common_with_ranks
def tune(options: Options, job: "JobFile", **wanted: Any) -> None:
    """Search the best plan for JOB with short, real training steps."""
    inspect_job(options, job, uses_devices=True, submits=wanted["submit"])
    from autotune.cli.work import tune_job

    tune_job(options, job, **wanted)


@main.command()
@JOB
@SET
@click.option(
    "--plan",
    metavar="FILE|ID",
    help="Plan file (YAML or JSON) or ID of a tried plan to train with. Default: the winner.",
)
@click.option("--resume-with", metavar="FILE|ID", help="Plan with which to continue a training of another plan.")
@click.option("--steps", type=Count(1), help="Stop, with a checkpoint, after this many steps in all.")
@click.option("--dry-run", is_flag=True, help="Print the commands of the ranks without starting them.")
@click.option(
    "--certify",
    is_flag=True,
    help="First make a new certificate of the plan (steps, inputs, updates, saved weights); train only if it holds.",
)
@RETUNE
@LAUNCHER
@SUBMIT
@common_with_ranks
def launch(options: Options, job: "JobFile", **wanted: Any) -> None:
    """Run the full training of JOB with its best plan."""
    if wanted["resume_with"] and (wanted["plan"] or wanted["dry_run"]):
        raise click.UsageError("--resume-with cannot be combined with --plan or --dry-run; remove one of them")
    inspect_job(options, job, uses_devices=not wanted["dry_run"], submits=wanted["submit"])
    from autotune.cli.work import LaunchOptions, launch_job

    launch_job(options, job, LaunchOptions(**wanted))


@main.command()
@JOB
@SET
@RETUNE
@LAUNCHER
@SUBMIT
@common_with_ranks
def run(options: Options, job: "JobFile", **wanted: Any) -> None:
    """Tune JOB if no valid plan is known, then launch it."""
    inspect_job(options, job, uses_devices=True, submits=wanted["submit"])
    from autotune.cli.work import run_job

    run_job(options, job, **wanted)


@main.command()
@JOB
@SET
@click.option("--out", type=click.Path(path_type=Path), help="Write the costs to this .json file.")
@click.option("--fresh", is_flag=True, help="Measure again even if a profile is stored.")
@common_with_ranks
def profile(options: Options, job: "JobFile", out: Path | None, fresh: bool) -> None:
    """Time each kind of layer of JOB's model alone, and store its costs for predictions."""
    inspect_job(options, job, uses_devices=True)
    from autotune.cli.work import profile_job

    profile_job(options, job, out=out, fresh=fresh)


@main.command()
@click.option("--here", is_flag=True, help="Only plans that hold on this machine, or else the nearest.")
@click.option(
    "--like",
    metavar="JOB",
    **JOB_PATH,
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
@click.option("--top", type=SIZE, help="Show at most this many.")
@SET
@common
def plans(options: Options, **wanted: Any) -> None:
    """List the stored winners, and whether they hold on this machine."""
    from autotune.cli.stored.query import PlanFilter, list_plans

    list_plans(options, PlanFilter(**wanted))


_SUBJECT = click.argument("name")


@main.command()
@_SUBJECT
@click.argument("text", required=False)
@click.option("--remove", is_flag=True, help="Remove the note.")
@common
def note(options: Options, name: str, text: str | None, remove: bool) -> None:
    """Set the note of the study or plan NAME to TEXT, or show it."""
    from autotune.cli.stored import annotations

    annotations.note(options, name, text, is_removed=remove)


@main.command()
@_SUBJECT
@click.argument("tags", metavar="[TAG...]", nargs=-1)
@click.option("--remove", metavar="TAG", multiple=True, help="Remove this tag; may be given several times.")
@common
def tag(options: Options, name: str, tags: tuple[str, ...], remove: tuple[str, ...]) -> None:
    """Add each TAG to the study or plan NAME, remove some, or show its tags."""
    from autotune.cli.stored import annotations

    annotations.tag(options, name, tags, remove)


@main.command()
@click.argument("plan")
@common
def show(options: Options, plan: str) -> None:
    """Show a tried PLAN: its measurements, how certain they are, and whether it is valid here.

    Of several studies that tried it, the one that is most valid here counts; PLAN@STUDY chooses one, and a STUDY
    alone means its winner.
    """
    from autotune.cli.stored.query import show_plan

    show_plan(options, plan)


@main.command()
@click.argument("first", metavar="PLAN")
@click.argument("second", metavar="PLAN")
@common
def compare(options: Options, first: str, second: str) -> None:
    """Show two tried PLANs side by side. PLAN@STUDY chooses a study; a STUDY alone means its winner."""
    from autotune.cli.stored.query import compare_plans

    compare_plans(options, first, second)


@main.command()
@click.argument("study", required=False)
@click.option("--out", type=click.Path(path_type=Path), help="HTML file to write. Default: report-ID.html, here.")
@click.option(
    "--artifacts",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder in which to keep it for optuna-dashboard, whose option --artifact-dir names the same folder.",
)
@common
def report(options: Options, study: str | None, out: Path | None, artifacts: Path | None) -> None:
    """Write a report of STUDY, or of the newest study, as one HTML file."""
    from autotune.cli.stored.html_report import report_study

    report_study(options, study, out, artifacts)


@main.command()
@click.argument("job", required=False, **JOB_PATH)
@SET
@common
def doctor(options: Options, job: "JobFile | None") -> None:
    """Report on hardware, software and database, on problems to solve, and on the data of JOB."""
    if job is not None:
        inspect_job(options, job)
    from autotune.cli.doctor import examine

    examine(options, job)


@main.command()
@click.option("--allow-runs", is_flag=True, help="Offer tune and launch, which use the devices, as well.")
@common_with_ranks
def mcp(options: Options, allow_runs: bool) -> None:
    """Serve an assistant with these commands, by the Model Context Protocol on stdin and stdout."""
    from autotune.output_file import check_library

    check_library("`autotune mcp`", "mcp.server.context", "'mcp>=2.3,<3'")  # 1.x has other names
    from autotune.cli.assistants.server import serve

    options.display.close()  # it would count the seconds, to the end of the session
    serve(main.commands, options.database, allows_runs=allow_runs)


@main.command()
@common
def schema(options: Options) -> None:
    """Print the JSON Schema of the job file, with which editors complete and check it."""
    import json

    from autotune.job_file import json_schema

    options.give(json_schema, lambda: json.dumps(json_schema(), indent=2), is_code=True)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@common
def completion(options: Options, shell: str) -> None:
    """Print the script that completes commands and options in SHELL."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells of the argument"
    script = kind(main, {}, "autotune", "_AUTOTUNE_COMPLETE").source()
    options.give(lambda: {"script": script}, lambda: script, is_code=True)


for command in (export, recommend, predict, pack, studies, db, node):
    main.add_command(command)
