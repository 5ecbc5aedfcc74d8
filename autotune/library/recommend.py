"""Plans for devices that are not here."""

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.advice.data_sheets import data_sheet
from autotune.advice.recommendation import Recommendation, recommend_for
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
    listener: Listener = unheard,
) -> Recommendation:
    """Recommend a number of devices of a kind, and the best plan for each number, by default each power of 2 up to 64.

    `device` is the short name of a data sheet, such as `h100`; `deadline` a time for the whole training, such as
    `24h`. Of the model its configuration is enough, and of the data its lengths. Raise RecommendError for another
    device or time, and what a job's model and data raise.
    """
    for count in devices or ():
        check_whole(RecommendError, devices=(count, 1))
    sheet = data_sheet(text_of(RecommendError, "device", device))
    seconds = None if deadline is None else _seconds(deadline)
    return recommend_for(as_job(job), sheet, devices=devices, deadline_seconds=seconds, listener=listener)


def job_values(model: str, data: Sequence[str]) -> Mapping[str, Any]:
    """Return the sections of a job for a model, of which no weights are needed, and annotation files."""
    return {
        "model": {"path": model, "weights": "random"},
        "data": {"sources": [{"path": each} for each in data]},
    }


def _seconds(deadline: str) -> float:
    try:
        return parse_seconds(deadline)
    except ValueError as error:
        raise RecommendError(f"deadline: {error}") from error
