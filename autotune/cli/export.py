"""The command that writes a plan for another trainer."""

from pathlib import Path
from typing import Any

from autotune.cli.context import Options
from autotune.draft.arguments import read_arguments
from autotune.exporting.checks import check_wanted
from autotune.job_file import JobFile


def export_job(
    options: Options,
    file: JobFile,
    trainer: str,
    *,
    plan: str | None,
    present: Path | None,
    python: Path | None,
    out: Path | None,
    **cluster: Any,
) -> None:
    folder = out or Path(f"{file.path.stem}-{trainer}")
    check_wanted(trainer, folder)
    arguments = read_arguments(present) if present else None
    # These import torch, which takes seconds.
    from autotune.exporting.report import export_document, export_text
    from autotune.forecast.cluster import ClusterOptions
    from autotune.library.export import Wanted, exported

    url = options.database_url(file.job.database)
    wanted = Wanted(trainer=trainer, folder=folder, plan=plan, present=arguments, python=python)
    found = exported(file.job, wanted, ClusterOptions(**cluster), url, options.display)
    options.give(lambda: export_document(found), lambda: export_text(found))
