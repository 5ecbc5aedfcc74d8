"""The search for the best plan."""

from autotune.certification.certify import certify, known_certificate, warn_of
from autotune.database_setting import chosen_database
from autotune.events import Listener, unheard
from autotune.job_file import JobLike, as_job, with_values
from autotune.search.compiling import decided
from autotune.search.tuner import Tuner
from autotune.training.training_log import check_loggers
from autotune.workbench import workbench
from storage.records import BestPlan


def tune(
    job: JobLike,
    *,
    trials: int | None = None,
    time_limit: float | str | None = None,
    launcher: str | None = None,
    fresh: bool = False,
    database: str | None = None,
    listener: Listener = unheard,
) -> BestPlan:
    """Search the best plan of a job with short, real training steps, and certify it.

    `trials`, `time_limit` in seconds or as in a job file, and `launcher` override the job. A search that is finished is
    not repeated unless `fresh`; an unfinished one is resumed. A certificate that does not hold is logged as a warning.

    Raise JobError, DeviceBusy, NoFeasiblePlan and TrialsKeepFailing; everything measured until then is kept.
    """
    given = {"trials": trials, "time_limit": time_limit}
    job = with_values(as_job(job), "search", given)
    job = with_values(job, "hardware", {"launcher": launcher})
    check_loggers(job)
    with workbench(job, chosen_database(database, job.database), listener) as opened:
        bench = decided(opened, listener, fresh=fresh)
        best = Tuner(bench, listener).tune(fresh=fresh)
        certificate = known_certificate(bench.prepared, best.plan, bench.folder)
        if certificate is None:
            certificate = certify(bench.prepared, best.plan, bench.folder, bench.site, listener)
    warn_of(certificate)
    return best
