"""Forecasts for a job, from stored profiles and trials."""

from pathlib import Path

from autotune.events import Listener, Note, Phase, PhaseBegan
from autotune.forecast.cluster import ClusterOptions, cluster_of_file, cluster_of_store
from autotune.forecast.forecast import Forecast, ForecastData, Forecaster
from autotune.model_shape import model_shape
from autotune.plan_file import is_plan_file, read_plan
from autotune.results.known_plan import known_text
from storage.reading import read_store
from trials.job import Job
from trials.plan import Plan


def forecaster_of(job: Job, options: ClusterOptions, database_url: str | None, listener: Listener) -> Forecaster:
    """Return the forecaster of a job, which has learned from its stored trials unless a profile file is given.

    Raise what `cluster_of_file`, `cluster_of_store` and `Forecaster` raise.
    """
    shape = model_shape(job.model, job.training)
    if (profile := options.profile_file) is not None:
        cluster = cluster_of_file(job, shape, profile, options)
        return Forecaster(job, shape, cluster, _data_of(job, listener))
    # Not held while the data are read, for minutes perhaps: it is opened again for the trials.
    with read_store(database_url) as store:
        cluster = cluster_of_store(job, shape, store, options)
    data = _data_of(job, listener)
    with read_store(database_url) as store:
        forecaster = Forecaster(job, shape, cluster, data)
        trials = store.comparable_trials(forecaster.workload)
    if trials:
        listener(PhaseBegan(phase=Phase.PREDICTION, text="Learning from trials"))
        forecaster.learn(trials)
    return forecaster


def _data_of(job: Job, listener: Listener) -> ForecastData:
    listener(PhaseBegan(phase=Phase.LENGTHS, text="Reading the data"))
    return ForecastData.of(job, listener)


def forecasts(
    job: Job,
    options: ClusterOptions,
    database_url: str | None,
    listener: Listener,
    *,
    plan: Plan | str | None,
    top: int,
) -> tuple[Forecaster, tuple[Forecast, ...]]:
    """Return the forecaster, with the forecast of a plan or those of the `top` best plans of solver and trials.

    `plan` is a plan, a plan file, or the beginning of the id of a tried plan, of which the listener gets how well it
    is known. Raise PredictError for a file, and what `cluster_of_file`, `cluster_of_store` and `Forecaster` raise.
    """
    if isinstance(plan, str):
        plan = named_plan(plan, database_url, listener)
    forecaster = forecaster_of(job, options, database_url, listener)
    if plan is not None:
        return forecaster, (forecaster.of(plan),)
    text = "Solving for the best plans of every layout and packing"
    listener(PhaseBegan(phase=Phase.PREDICTION, text=text))
    return forecaster, forecaster.best(top)


def named_plan(text: str, database_url: str | None, listener: Listener) -> Plan:
    if is_plan_file(text):
        return read_plan(Path(text))
    with read_store(database_url) as store:
        tried = store.find_plan(text)
    listener(Note(text=known_text(tried)))
    return tried.plan
