"""Predictions without running a plan."""

import os

from autotune.database_setting import chosen_database
from autotune.errors import PredictError
from autotune.events import Listener, unheard
from autotune.forecast.cluster import ClusterOptions
from autotune.forecast.forecast import Forecast
from autotune.forecast.job_forecasts import forecasts
from autotune.job_file import JobLike, as_job
from autotune.library.values import bytes_of, check_whole, text_of
from trials.plan import Plan


def predict(
    job: JobLike,
    *,
    plan: Plan | str | os.PathLike[str] | None = None,
    devices: int | None = None,
    memory_limit: str | None = None,
    device_profile: str | os.PathLike[str] | None = None,
    top: int = 5,
    database: str | None = None,
    listener: Listener = unheard,
) -> tuple[Forecast, ...]:
    """Predict time and memory of a plan, or of the `top` best plans of the solver and of trials, without running one.

    `plan` is a plan, a plan file, or the id of a tried plan. `devices` and `memory_limit` of a rank, such as `80GiB`,
    override the job. `device_profile` is a profile file, or a device's name or a part of it.

    Raise PredictError, ProfileError, NoProfile and NoFeasiblePlan.
    """
    check_whole(PredictError, top=(top, 1), devices=(devices, 1))
    options = ClusterOptions(
        devices=devices,
        memory_limit_bytes=None if memory_limit is None else bytes_of(memory_limit),
        device_profile=None if device_profile is None else text_of(PredictError, "device_profile", device_profile),
    )
    job = as_job(job)
    url = chosen_database(database, job.database)
    chosen = plan if plan is None or isinstance(plan, Plan) else text_of(PredictError, "plan", plan)
    return forecasts(job, options, url, listener, plan=chosen, top=top)[1]
