"""The workbenches of searches and trainings, opened once what their job names is checked."""

from collections.abc import Iterator
from contextlib import contextmanager

from autotune.certification.certify import check_place
from autotune.events import Listener, Note
from autotune.training.training_log import check_loggers
from autotune.training.training_output import check_output
from autotune.workbench import Workbench, workbench
from trials.job import Job
from trials.units import number_of


@contextmanager
def search_bench(
    job: Job,
    database_url: str | None,
    listener: Listener,
    *,
    starts_ranks: bool = True,
    creates_database: bool = True,
) -> Iterator[Workbench]:
    """Check the loggers, open the workbench, and tell the listener what it holds.

    The loggers are those of the training that follows the search. Raise what `check_loggers` and `workbench` raise.
    """
    check_loggers(job)
    with workbench(job, database_url, listener, starts_ranks=starts_ranks, creates_database=creates_database) as bench:
        work = bench.prepared.workload
        listener(
            Note(
                text=f"{number_of(work.data.samples, 'sample')}; {work.model.vision_layers} vision and "
                f"{work.model.language_layers} language layers; {work.hardware}"
            )
        )
        yield bench


@contextmanager
def training_bench(
    job: Job,
    database_url: str | None,
    listener: Listener,
    *,
    starts_ranks: bool = True,
    creates_database: bool = True,
) -> Iterator[Workbench]:
    """Check the output folder, and open the bench as for a search.

    Raise what `check_output`, `check_place` and `search_bench` raise.
    """
    check_output(job)
    check_place(job.training.output)
    with search_bench(
        job, database_url, listener, starts_ranks=starts_ranks, creates_database=creates_database
    ) as bench:
        yield bench
