"""The best plan that is known."""

from autotune.database_setting import chosen_database
from autotune.job_file import JobLike, as_job
from autotune.plan_choice import known_winner
from autotune.workload import look_at, workload_of
from storage.reading import read_store
from storage.records import BestPlan


def best_plan(job: JobLike, *, database: str | None = None) -> BestPlan:
    """Return the winner of the last search on exactly this job, on this hardware; searches without a trainer first.

    Takes no devices and measures nothing but the lengths of new samples. Raise PlanNotValid where no search on this
    job is finished; the message names the nearest plan.
    """
    job = as_job(job)
    now = workload_of(job, look_at(job))
    with read_store(chosen_database(database, job.database)) as store:
        return known_winner(store, now)
