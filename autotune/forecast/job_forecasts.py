"""Forecasts for a job, from stored profiles and trials."""

from pathlib import Path

from autotune.events import Listener, Note, Phase, PhaseBegan
from autotune.forecast.cluster import Cluster, ClusterOptions, cluster_of_file, cluster_of_store
from autotune.forecast.forecast import Forecast, ForecastData, Forecaster, workload_on
from autotune.forecast.profile_file import read_profile
from autotune.model_shape import model_shape
from autotune.plan_file import is_plan_file, read_plan
from autotune.results.known_plan import known_text
from autotune.search.compile_setting import AUTO, setting_of, with_compile
from storage.reading import read_store
from storage.store import Store
from trials.job import Job
from trials.plan import Plan
from trials.workload import ModelShape


def _forecaster_of(job: Job, options: ClusterOptions, database_url: str | None, listener: Listener) -> Forecaster:
    """Return the forecaster of a job, which has learned from its stored trials unless a profile file is given.

    With `training.compile: auto` it is of layers as decided; of a file, as they were profiled.
    """
    if (profile := options.profile_file) is not None:
        if job.training.compile == AUTO:
            job = with_compile(job, compiled=read_profile(profile).model.compiler is not None)
        shape = model_shape(job.model, job.training)
        cluster = cluster_of_file(job, shape, profile, options)
        return Forecaster(job, shape, cluster, _data_of(job, listener))
    # Not held while the data are read, for minutes perhaps: it is opened again for the trials.
    with read_store(database_url) as store:
        shape, cluster = _stored(job, options, store)
    data = _data_of(job, listener)
    with read_store(database_url) as store:
        if job.training.compile == AUTO:
            setting = setting_of(store, job, workload_on(cluster, job, shape, data))
            listener(Note(text=setting.text))
            if setting.compiled:
                job = with_compile(job, compiled=True)
                shape, cluster = _stored(job, options, store)
        forecaster = Forecaster(job, shape, cluster, data)
        trials = store.comparable_trials(forecaster.workload)
    if trials:
        listener(PhaseBegan(phase=Phase.PREDICTION, text="Learning from trials"))
        forecaster.learn(trials)
    return forecaster


def _stored(job: Job, options: ClusterOptions, store: Store) -> tuple[ModelShape, Cluster]:
    """Return the model of the job, and the stored profile of it. Raise what `cluster_of_store` raises."""
    shape = model_shape(job.model, job.training)
    return shape, cluster_of_store(job, shape, store, options)


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
    """Return the forecaster, with the forecast of a plan or those of the `top` best plans that the solver finds.

    `plan` is a plan, a plan file, or the beginning of the id of a tried plan, of which the listener gets how well it
    is known. Raise PredictError for a file, and what `cluster_of_file`, `cluster_of_store` and `Forecaster` raise.
    """
    if isinstance(plan, str):
        plan = _named_plan(plan, database_url, listener)
    forecaster = _forecaster_of(job, options, database_url, listener)
    if plan is not None:
        return forecaster, (forecaster.of(plan),)
    text = "Solving for the best plans of every layout and packing"
    listener(PhaseBegan(phase=Phase.PREDICTION, text=text))
    return forecaster, forecaster.best(top)


def _named_plan(text: str, database_url: str | None, listener: Listener) -> Plan:
    if is_plan_file(text):
        return read_plan(Path(text))
    with read_store(database_url) as store:
        tried = store.find_plan(text)
    listener(Note(text=known_text(tried)))
    return tried.plan
