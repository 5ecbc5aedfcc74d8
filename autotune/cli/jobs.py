"""The workload of a job, for commands that run nothing."""

from typing import TYPE_CHECKING

from autotune.cli.context import Options
from trials.workload import Workload

if TYPE_CHECKING:
    from autotune.job_file import JobFile
    from autotune.workload import Outline
    from trials.data.indexing import IndexReport
    from trials.job import Job


def outline_of(file: "JobFile") -> "tuple[Job, Outline]":
    """Load the job and probe its model and hardware."""
    from autotune.workload import look_at

    job = file.job
    return job, look_at(job)


def survey(options: Options, job: "Job", outline: "Outline") -> "tuple[Workload, IndexReport]":
    """Read the data of the job, with progress on stderr."""
    from autotune import workload

    return workload.survey(job, outline, options.display)
