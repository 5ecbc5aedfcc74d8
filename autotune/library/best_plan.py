"""The best plan that is known."""

import logging

from autotune.database_setting import chosen_database
from autotune.job_file import JobLike, as_job
from autotune.plan_choice import known_winner
from autotune.results.evidence import trials_behind
from autotune.results.rival import rival_of
from autotune.workload import look_at, workload_of
from storage.reading import read_store
from storage.records import BestPlan

_log = logging.getLogger(__name__)


def best_plan(job: JobLike, *, database: str | None = None) -> BestPlan:
    """Return the winner of the last search on exactly this job, on this hardware; searches without a trainer first.

    Takes no devices and measures nothing but the lengths of new samples. A baseline that measured faster in its own
    runs, with which `launch` may train, is logged as a warning. Raise PlanNotValid where no search on this job is
    finished; the message names the nearest plan.
    """
    job = as_job(job)
    now = workload_of(job, look_at(job))
    with read_store(chosen_database(database, job.database)) as store:
        winner = known_winner(store, now)
        if rival := rival_of(winner, trials_behind(winner, store)):
            _log.warning(
                "the best plan %s is in doubt: %s; predict(JOB, plan='%s')[0].plan is the plan of the baseline",
                winner.plan.id,
                rival,
                rival.plan_id,
            )
        return winner
