"""Plans for other trainers."""

import os
from dataclasses import dataclass
from pathlib import Path

from autotune.database_setting import chosen_database
from autotune.draft.arguments import Arguments, read_arguments
from autotune.errors import ExportError
from autotune.events import Listener, Note, Phase, PhaseBegan, unheard
from autotune.exporting.checks import check_wanted
from autotune.exporting.export import Exported, export_plan
from autotune.forecast.cluster import ClusterOptions
from autotune.forecast.forecast import Forecaster
from autotune.forecast.job_forecasts import forecaster_of, named_plan
from autotune.job_file import JobLike, as_job
from autotune.library.values import bytes_of, check_whole, text_of
from autotune.plan_choice import but_unused, trusted
from storage.reading import read_store
from trials.job import Job
from trials.plan import Plan


def export(
    job: JobLike,
    trainer: str,
    out: str | os.PathLike[str],
    *,
    plan: Plan | str | os.PathLike[str] | None = None,
    present: str | os.PathLike[str] | None = None,
    trainer_python: str | os.PathLike[str] | None = None,
    devices: int | None = None,
    memory_limit: str | None = None,
    device_profile: str | os.PathLike[str] | None = None,
    database: str | None = None,
    listener: Listener = unheard,
) -> Exported:
    """Write a plan for another trainer into the new folder `out`: data in its packs, and the trainer's configuration.

    `plan` is a plan, a plan file, or the id of a tried plan; by default the winner of the last search for the trainer
    or else of any search, or else the plan that the solver predicts to be fastest. Where the trainer cannot hold it,
    the best plan that it can hold is written. `present` is the user's own configuration of the trainer, of which all is
    kept that the export does not decide. The trainer's package counts tokens in the environment of `trainer_python`, by
    default this one. The other options are those of `predict`.

    Raise ExportError and what `predict` raises.
    """
    check_whole(ExportError, devices=(devices, 1))
    options = ClusterOptions(
        devices=devices,
        memory_limit_bytes=None if memory_limit is None else bytes_of(memory_limit),
        device_profile=None if device_profile is None else text_of(ExportError, "device_profile", device_profile),
    )
    arguments = None if present is None else read_arguments(Path(text_of(ExportError, "present", present)))
    read = as_job(job)
    chosen = plan if plan is None or isinstance(plan, Plan) else text_of(ExportError, "plan", plan)
    folder, url = Path(text_of(ExportError, "out", out)), chosen_database(database, read.database)
    python = None if trainer_python is None else Path(text_of(ExportError, "trainer_python", trainer_python))
    wanted = Wanted(trainer=trainer, folder=folder, plan=chosen, present=arguments, python=python)
    return exported(read, wanted, options, url, listener)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to export, and where to."""

    trainer: str
    folder: Path
    plan: Plan | str | None
    present: Arguments | None
    python: Path | None
    """Of the environment in which the trainer is installed; None for this one."""


def exported(
    job: Job, wanted: Wanted, options: ClusterOptions, database_url: str | None, listener: Listener
) -> Exported:
    """Export as `export` does."""
    check_wanted(wanted.trainer, wanted.folder)
    plan = wanted.plan
    if isinstance(plan, str):
        plan = named_plan(plan, database_url, listener)
    forecaster = forecaster_of(job, options, database_url, listener)
    if plan is None:
        plan = best_known(forecaster, wanted.trainer, database_url, listener)
    listener(PhaseBegan(phase=Phase.PREDICTION, text="Solving for the best plan within the trainer's limits"))
    return export_plan(forecaster, plan, wanted.trainer, wanted.folder, present=wanted.present, python=wanted.python)


def best_known(forecaster: Forecaster, trainer: str, database_url: str | None, listener: Listener) -> Plan:
    """Return the plan of the last search on this workload, or else the best plan that the solver finds.

    It is the winner, or the baseline that `launch` takes in its place, unless the trainer of the search cannot hold it.
    The last search for this trainer comes before others.
    """
    with read_store(database_url) as store:
        winner = store.last_winner(forecaster.workload.fingerprint, trainer)
        if winner is not None:
            known = trusted(store, winner, listener, keeps=lambda rival: not (rival.may_win and rival.left_out is None))
            what = "the winner of the last search" if known.plan == winner.plan else "a baseline of the last search"
            listener(Note(text=f"Exporting plan {known.plan.id}, {what}"))
            return known.plan
        unused = but_unused(store, forecaster.workload)
    best = forecaster.best(1)[0].plan
    text = f"Exporting plan {best.id}, predicted to be fastest: no plan is known for this job here{unused}"
    listener(Note(text=text))
    return best
