"""Commands that answer without running anything: each over a library function."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from autotune.advice.data_sheets import DATA_SHEETS
from autotune.cli.context import Options, inspect_job
from autotune.cli.parameters import (
    DEVICE_PROFILE,
    DEVICES,
    JOB,
    JOB_PATH,
    MEMORY,
    SET,
    SIZE,
    SIZE_OR_NONE,
    Count,
    Time,
    common,
)
from trials import plugins
from trials.data.packers import PACKERS

if TYPE_CHECKING:
    from autotune.job_file import JobFile


class DeviceName(click.types.StringParamType):
    """A name of a device, of which the message names some where it is missing."""

    KNOWN = f"One of {', '.join(DATA_SHEETS)}, or a profiled one."

    @override
    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        return self.KNOWN


class JobOrModel(click.Command):
    """A command with a model and data, or with a job file in place of both."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        if ctx.resilient_parsing or ctx.params["data"]:
            return rest
        from autotune.job_file import JobFile

        path = Path(ctx.params["model"])
        if not path.exists() or path.is_dir():
            raise click.UsageError(f"{path} is not a job file; name one, or the annotation files after the model", ctx)
        ctx.params["model"] = JobFile(path=path, changes=ctx.params["changes"])
        return rest


@click.command(cls=JobOrModel)
@click.argument("model")
@click.argument("data", nargs=-1, metavar="[DATA...]", type=click.Path(path_type=Path))
@click.option("--device", metavar="NAME", type=DeviceName(), required=True, help=DeviceName.KNOWN)
@click.option(
    "--devices", multiple=True, type=SIZE, help="Number of devices; may be given several times. Default: 1, 2, ... 64."
)
@click.option("--deadline", type=Time(), metavar="TIME", help="Most time for the whole training, such as 24h.")
@click.option("--price", type=click.FloatRange(min=0, min_open=True), help="Price of an hour of one device.")
@click.option(
    "--set",
    "changes",
    metavar="KEY=VALUE",
    multiple=True,
    help="Value of a job, such as training.epochs=2; may be given several times.",
)
@common
def recommend(options: Options, model: "str | JobFile", data: tuple[Path, ...], **wanted: Any) -> None:
    """Recommend how many devices, and which plan, train MODEL on DATA, without a device.

    A job file may stand in place of MODEL, without DATA. The device is one with a data sheet, or part of the name of
    one on which MODEL was profiled.
    """
    from autotune.cli.recommend import recommend_devices

    recommend_devices(options, model, data, **wanted)


@click.command()
@JOB
@SET
@click.option(
    "--plan",
    metavar="FILE|ID",
    help="Plan file (YAML or JSON) or ID of a tried plan. Default: the best plans of the solver and of trials.",
)
@DEVICES
@MEMORY
@DEVICE_PROFILE
@click.option("--top", type=SIZE, default=5, help="Number of plans to show, best first; with --plan only that one.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw a typical step into this .png, .svg or .pdf file.")
@common
def predict(options: Options, job: "JobFile", plan: str | None, top: int, plot: Path | None, **wanted: Any) -> None:
    """Predict how fast plans for JOB are, here or on other devices, without running them."""
    inspect_job(options, job)
    from autotune.cli.predict import predict_job
    from autotune.forecast.cluster import ClusterOptions

    predict_job(options, job, ClusterOptions(**wanted), plan=plan, top=top, picture=plot)


@click.command()
@click.argument("job", metavar="INPUT", **JOB_PATH)
@SET
@click.option("--qv", type=SIZE_OR_NONE, help="Most vision units of a pack. Default: chosen for the data.")
@click.option("--qt", type=SIZE, help="Most text tokens of a pack. Default: chosen for the data.")
@click.option("--qv-min", type=SIZE_OR_NONE, help="Vision units that fill a pack. Default: qv.")
@click.option("--qt-min", type=SIZE_OR_NONE, help="Text tokens that fill a pack. Default: qt - 128.")
@click.option("--packer", metavar="NAME", help=f"{', '.join(plugins.names(PACKERS))} or best. Default: best, by cost.")
@click.option(
    "--data-parallel",
    type=Count(1, 1 << 16),
    help="Number of data-parallel ranks. Default: the job's, or 8.",
)
@click.option("--global-batch", type=SIZE, help="Samples of a step. Default: the job's, or 128.")
@click.option("--seed", type=SIZE_OR_NONE, help="Seed of order and packs. Default: the job's, or 0.")
@click.option("--epoch", type=SIZE_OR_NONE, default=0, help="Number of the epoch, counted from 0.")
@click.option(
    "--oversize",
    type=click.Choice(["own-pack", "truncate", "skip", "fail"]),
    help="What to do with a sample above qv or qt. Default: the job's, or own-pack.",
)
@click.option("--model", metavar="PATH", help="Model whose cost weighs a file of lengths. Default: OmniBal's.")
@click.option(
    "--what-if",
    "several",
    metavar="NAME=VALUE,...",
    multiple=True,
    help="Compare the data under other settings, such as max_pixels=602112,cutoff=4096; may be given several times.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Write the packs to this .jsonl or .parquet file.")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Draw before and after into this .png, .svg or .pdf file."
)
@common
def pack(
    options: Options, job: "JobFile", several: tuple[str, ...], out: Path | None, plot: Path | None, **wanted: Any
) -> None:
    """Pack INPUT, a job's data or a file of lengths, and show how balanced it is before and after."""
    from autotune.cli.data import compare_data, pack_data
    from autotune.packing.material import PackOptions

    packs = PackOptions(global_batch_samples=wanted.pop("global_batch"), **wanted)
    if several:
        if out or plot:
            raise click.UsageError("--what-if compares and writes no file; leave --out and --plot out")
        if packs != PackOptions():
            raise click.UsageError(
                "--what-if compares the job's best plans, which choose their own packs; leave the options of packs "
                "out, and set training.global_batch_samples, training.seed, hardware.devices or data.oversize with "
                "--set"
            )
        compare_data(options, job, several)
    else:
        pack_data(options, job, packs, out=out, picture=plot)


@click.command()
@JOB
@SET
@click.option("--to", "trainer", metavar="TRAINER", required=True, help="internvl, llama-factory, ms-swift or qwen-vl.")
@click.option(
    "--plan",
    metavar="FILE|ID",
    help="Plan file (YAML or JSON) or ID of a tried plan. Default: the winner, else the best that the solver finds.",
)
@click.option(
    "--from",
    "present",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Your own configuration of TRAINER, of which is kept what the export does not decide.",
)
@click.option(
    "--trainer-python",
    "python",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Python of the environment in which TRAINER is installed, to compare its token counts. Default: this one.",
)
@click.option("--out", type=click.Path(path_type=Path), help="New folder. Default: JOB-TRAINER, here.")
@DEVICES
@MEMORY
@DEVICE_PROFILE
@common
def export(options: Options, job: "JobFile", trainer: str, **wanted: Any) -> None:
    """Write a plan for JOB as data and configuration of another TRAINER, and show what that costs."""
    inspect_job(options, job)
    from autotune.cli.export import export_job

    export_job(options, job, trainer, **wanted)
