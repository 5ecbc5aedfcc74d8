"""The full training."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from autotune.certification.certificate import Certificate
from autotune.certification.certify import known_certificate, warn_of
from autotune.database_setting import chosen_database
from autotune.errors import JobError, PlanNotValid
from autotune.events import Listener, Note, unheard
from autotune.job_file import JobLike, as_job, with_values
from autotune.library.benches import training_bench
from autotune.library.values import check_whole, text_of
from autotune.plan_choice import Keeps, binding, choose_plan, is_of_store, unasked
from autotune.results.known_plan import KnownPlan
from autotune.training.full_training import Launched
from autotune.training.plan_change import check_begun, plan_begun, plan_of_training
from autotune.training.retuning import certified, check_checkpoints
from autotune.training.watched_training import TrainingOptions, WatchedTraining
from autotune.workbench import Workbench
from trials.job import Job
from trials.plan import Plan


def launch(
    job: JobLike,
    *,
    plan: Plan | str | os.PathLike[str] | None = None,
    resume_with: Plan | str | os.PathLike[str] | None = None,
    steps: int | None = None,
    certify: bool = False,
    retune_on_drift: bool = False,
    launcher: str | None = None,
    database: str | None = None,
    listener: Listener = unheard,
    stops: Callable[[], bool] = lambda: False,
) -> Launched:
    """Run the full training of a job with its best plan, or with `plan`; an interrupted training resumes with its own.

    Where a baseline measured faster than the best plan in its own runs, by more than a standard error, it is taken in
    its place if the search space has it; a note says which of the two it is.

    A plan is given as a value, by a plan file, or by its id if it was tried. `resume_with` continues a training of
    another plan with this one. The training stops after `steps` in all. With `certify` it starts only with a new
    certificate that holds; without it, a stored one that does not hold is logged as a warning. With `retune_on_drift` a
    training that has become slower than promised is tuned again at a checkpoint, and goes on with the winner.
    `launcher` overrides that of the job. `stops` is called many times a second: once it returns True, the ranks finish
    their step and write a checkpoint; a search in between is not stopped by it. Without it, Ctrl-C ends them at once,
    and the next launch continues from the last checkpoint.

    Raise PlanNotValid, NotCertified, OutputTaken, DeviceBusy and LaunchFailed.
    """
    if plan is not None and resume_with is not None:
        raise JobError("`plan` and `resume_with` exclude each other; give one of them")
    check_whole(JobError, steps=(steps, 1))
    wanted = resume_with if plan is None else plan
    named = wanted if wanted is None or isinstance(wanted, Plan) else text_of(JobError, "plan", wanted)
    job = with_values(as_job(job), "hardware", {"launcher": launcher})
    if retune_on_drift:
        check_checkpoints(job)
    url = chosen_database(database, job.database)
    with bench_with_plan(job, url, named, listener, retunes=retune_on_drift) as (bench, chosen):
        return WatchedTraining(
            bench=bench,
            chosen=chosen,
            certificate=certificate_to_train(bench, chosen.plan, listener, certifies=certify),
            options=TrainingOptions(max_steps=steps, changes_plan=resume_with is not None, retunes=retune_on_drift),
            listener=listener,
            stopping=lambda: nullcontext(stops),
        ).run()


def certificate_to_train(bench: Workbench, plan: Plan, listener: Listener, *, certifies: bool) -> Certificate | None:
    """Return a new certificate of the plan where a training `certifies`; else warn of a stored one that does not hold.

    Raise what `certified` raises.
    """
    if certifies:
        return certified(bench, plan, listener)
    if known := known_certificate(bench.prepared, plan, bench.folder):
        warn_of(known)
    return None


@contextmanager
def bench_with_plan(
    job: Job,
    database_url: str | None,
    wanted: Plan | str | None,
    listener: Listener,
    keeps: Keeps = unasked,
    *,
    retunes: bool = False,
    starts_ranks: bool = True,
) -> Iterator[tuple[Workbench, KnownPlan]]:
    """Open the bench of a training, and choose the wanted plan, or the winner, or what `trusted` puts in its place.

    Without a wanted plan, a training that has begun goes on with its own; one that `retunes` only where no plan is
    known for the job here. A database is created only for ranks that train with a plan from elsewhere.

    Raise what `training_bench`, `choose_plan` and `check_begun` raise.
    """
    output = job.training.output
    creates = starts_ranks and not is_of_store(wanted, output)
    with training_bench(job, database_url, listener, starts_ranks=starts_ranks, creates_database=creates) as bench:
        now = bench.prepared.workload
        try:
            chosen = choose_plan(bench.store, now, wanted, listener, output, keeps=keeps, binds=binding(bench.prepared))
        except PlanNotValid:
            check_begun(bench.prepared)  # where that raises, another plan would not help
            own = plan_begun(bench, listener) if wanted is None else None
            if own is None:
                raise
            listener(Note(text=f"The training goes on with its plan {own.plan.id}: no plan is known for this job here"))
            chosen = own
        keeps_own = wanted is None and not retunes
        yield bench, plan_of_training(bench, chosen, listener) if keeps_own else chosen
