"""The search for the best plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.certification.certificate import Certificate
from autotune.certification.certify import certify, known_certificate, warn_of
from autotune.database_setting import chosen_database
from autotune.events import Listener, unheard
from autotune.job_file import JobLike, as_job, with_values
from autotune.library.benches import search_bench
from autotune.results.evidence import trials_behind
from autotune.search.tuner import Tuner
from autotune.workbench import Workbench
from storage.records import BestPlan, TrialSummary
from trials.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Result of a search."""

    best: BestPlan
    certificate: Certificate
    """Certificate of the winner, whether it holds or not."""
    trials: Sequence[TrialSummary]
    """Trials on which the winner's figures rest."""


def tune(
    job: JobLike,
    *,
    trials: int | None = None,
    time_limit: str | None = None,
    launcher: str | None = None,
    fresh: bool = False,
    database: str | None = None,
    listener: Listener = unheard,
) -> BestPlan:
    """Search the best plan of a job with short, real training steps, and certify it.

    `trials`, `time_limit` such as `20min`, and `launcher` override the job. A search that is finished is not repeated
    unless `fresh`; an unfinished one is resumed. A certificate that does not hold is logged as a warning.

    Raise JobError, DeviceBusy, NoFeasiblePlan and TrialsKeepFailing; everything measured until then is kept.
    """
    given = {"trials": trials, "time_limit": time_limit}
    job = with_values(as_job(job), "search", given)
    job = with_values(job, "hardware", {"launcher": launcher})
    return tuned(job, chosen_database(database, job.database), listener, fresh=fresh).best


def tuned(job: Job, database_url: str | None, listener: Listener, *, fresh: bool) -> Tuned:
    """Search as `tune` does, and return what is known of the winner, too."""
    with search_bench(job, database_url, listener) as bench:
        best, certificate = certified_winner(bench, listener, fresh=fresh)
        found = Tuned(best=best, certificate=certificate, trials=trials_behind(best, bench.store))
    warn_of(certificate)
    return found


def certified_winner(bench: Workbench, listener: Listener, *, fresh: bool) -> tuple[BestPlan, Certificate]:
    """Search, and certify the winner unless that was done before, whether it holds or not."""
    best = Tuner(bench, listener).tune(fresh=fresh)
    known = known_certificate(bench.prepared, best.plan, bench.folder)
    return best, known or certify(bench.prepared, best.plan, bench.folder, bench.site, listener)
