"""Plans for devices that are not here."""

from collections.abc import Sequence

from autotune.advice.recommendation import Recommendation, recommend_for
from autotune.database_setting import chosen_database
from autotune.errors import RecommendError
from autotune.events import Listener, unheard
from autotune.job_file import JobLike, as_job
from autotune.library.values import check_whole, text_of
from trials.units import parse_seconds


def recommend(
    job: JobLike,
    *,
    device: str,
    devices: Sequence[int] | None = None,
    deadline: str | None = None,
    database: str | None = None,
    listener: Listener = unheard,
) -> Recommendation:
    """Recommend a number of devices of a kind, and the best plan for each number, by default each power of 2 up to 64.

    `device` is the short name of a data sheet, such as `h100`, or part of the name of devices on which the model was
    profiled; `deadline` a time for the whole training, such as `24h`. Of the model its configuration is enough, and of
    the data its lengths. What the database knows of the device is measured, all else analytic. Raise RecommendError for
    another device or time, and what a job's model and data raise.
    """
    if devices is not None and (isinstance(devices, str) or not isinstance(devices, Sequence)):
        raise RecommendError(f"devices must be a list of whole numbers, not {devices!r}; give [4], say")
    for count in devices or ():
        check_whole(RecommendError, devices=(count, 1))
    job = as_job(job)
    return recommend_for(
        job,
        text_of(RecommendError, "device", device),
        devices=devices,
        deadline_seconds=None if deadline is None else _seconds(deadline),
        database_url=chosen_database(database, job.database),
        listener=listener,
    )


def _seconds(deadline: str) -> float:
    try:
        return parse_seconds(deadline)
    except ValueError as error:
        raise RecommendError(f"deadline: {error}") from error
