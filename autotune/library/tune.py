"""The search for the best plan."""

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.certification.certificate import Certificate
from autotune.certification.certify import certify, known_certificate, warn_of
from autotune.database_setting import chosen_database
from autotune.errors import ExportError
from autotune.events import Listener, unheard
from autotune.exporting.checks import check_trainer, target_of
from autotune.job_file import JobLike, as_job, with_values
from autotune.library.benches import search_bench
from autotune.library.values import text_of
from autotune.model_shape import model_shape
from autotune.results.evidence import trials_behind
from autotune.search.sampling.proposals import load_sampler
from autotune.search.space.abilities import Target
from autotune.search.space.given_plans import check_readable
from autotune.search.tuner import Tuner
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
    trainer: str | None = None,
    fresh: bool = False,
    database: str | None = None,
    listener: Listener = unheard,
) -> BestPlan:
    """Search the best plan of a job with short, real training steps, and certify it.

    `trials`, `time_limit` such as `20min`, and `launcher` override the job. A search that is finished is not repeated
    unless `fresh`; an unfinished one is resumed. A certificate that does not hold is logged as a warning. For a
    `trainer`, such as `ms-swift`, only plans are searched that `export` can write for it as they are.

    Raise JobError, ExportError, DeviceBusy, NoFeasiblePlan and TrialsKeepFailing; everything measured until then is
    kept.
    """
    given = {"trials": trials, "time_limit": time_limit}
    job = with_values(as_job(job), "search", given)
    job = with_values(job, "hardware", {"launcher": launcher})
    url = chosen_database(database, job.database)
    return tuned(job, url, listener, fresh=fresh, trainer=trainer).best


def tuned(job: Job, database_url: str | None, listener: Listener, *, fresh: bool, trainer: str | None = None) -> Tuned:
    """Search as `tune` does, and return what is known of the winner, too."""
    target = None if trainer is None else _target(trainer, job)
    # The tuner checks more, but only once other work on the devices has ended.
    load_sampler(job.search.sampler)
    check_readable(job.search)
    with search_bench(job, database_url, listener) as bench:
        best = Tuner(bench, listener, target).tune(fresh=fresh)
        certificate = known_certificate(bench.prepared, best.plan, bench.folder)
        if certificate is None:
            certificate = certify(bench.prepared, best.plan, bench.folder, bench.site, listener)
        found = Tuned(best=best, certificate=certificate, trials=trials_behind(best, bench.store))
    warn_of(certificate)
    return found


def _target(trainer: str, job: Job) -> Target:
    """Return the limits of a trainer. Raise ExportError for an unknown one, and where it cannot train the job."""
    check_trainer("--for", text_of(ExportError, "trainer", trainer))
    return target_of(trainer, job, model_shape(job.model, job.training).family)
