"""What commands do with a job before anything runs."""

from typing import TYPE_CHECKING

from autotune.cli.context import Options

if TYPE_CHECKING:
    from autotune.job_file import JobFile
    from autotune.workload import Outline
    from trials.data.indexing import IndexReport
    from trials.job import Job
    from trials.workload import Workload


def inspect_job(options: Options, file: "JobFile", *, uses_devices: bool = False) -> None:
    """Read the job, and refuse devices in use, then show that the command works: torch takes seconds to import."""
    job = file.job
    if uses_devices:
        from autotune.machine.job_hardware import check_free

        check_free(job)
    from autotune.events import Phase, PhaseBegan

    options.display(PhaseBegan(phase=Phase.PROBE, text="Inspecting the model, the data and the hardware"))


def outline_of(file: "JobFile") -> "tuple[Job, Outline]":
    """Load the job and probe its model and hardware."""
    from autotune.workload import look_at

    job = file.job
    return job, look_at(job)


def survey(options: Options, job: "Job", outline: "Outline") -> "tuple[Workload, IndexReport]":
    """Read the data of the job, with progress on stderr."""
    from autotune import workload

    return workload.survey(job, outline, options.display)
