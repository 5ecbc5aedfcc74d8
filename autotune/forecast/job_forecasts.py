"""Forecasts for a job, from stored profiles and trials."""

from pathlib import Path

from autotune.events import Listener, Note, Phase, PhaseBegan, unheard
from autotune.forecast.cluster import ClusterOptions, cluster_of_file, cluster_of_store
from autotune.forecast.forecast import Forecast, Forecaster
from autotune.forecast.profile_file import read_profile
from autotune.plan_file import is_plan_file, read_plan
from autotune.results.known_plan import known_text
from autotune.search.compile_setting import AUTO, setting_of, with_compile
from storage.store import open_store
from trials.job import Job
from trials.model.identity import path_digest
from trials.model.shape import model_shape
from trials.plan import Plan


def forecaster_of(
    job: Job,
    options: ClusterOptions,
    database_url: str | None,
    listener: Listener = unheard,
) -> Forecaster:
    """Return the forecaster of a job, which has learned from its stored trials unless a profile file is given.

    With `training.compile: auto` it is of layers as decided; of a file, as they were profiled.

    Raise what `cluster_of_file`, `cluster_of_store` and `Forecaster` raise.
    """
    is_open = job.training.compile == AUTO
    if is_open and options.profile_file:
        job = with_compile(job, compiled=read_profile(options.profile_file).model.compiler is not None)
    shape = model_shape(job.model, job.training)
    if profile := options.profile_file:
        cluster = cluster_of_file(job, shape, profile, options)
    else:
        # Not held while the data are read, for minutes perhaps: it is opened again for the trials.
        with open_store(database_url) as store:
            store.adopt_model(shape, path_digest(job.model))
            cluster = cluster_of_store(job, shape, store, options)
    listener(PhaseBegan(phase=Phase.LENGTHS, text="Reading the data"))
    forecaster = Forecaster(job, shape, cluster, listener)
    if options.profile_file is None:
        with open_store(database_url) as store:
            if is_open:
                setting = setting_of(store, job, forecaster.workload)
                listener(Note(text=setting.text))
                if setting.compiled:
                    return forecaster_of(with_compile(job, compiled=True), options, database_url, listener)
            trials = store.comparable_trials(forecaster.workload)
        if trials:
            listener(PhaseBegan(phase=Phase.PREDICTION, text="Learning from trials"))
            forecaster.learn(trials)
    return forecaster


def forecasts(
    forecaster: Forecaster, plan: Plan | None, top: int, listener: Listener = unheard
) -> tuple[Forecast, ...]:
    """Return the forecast of a plan, or those of the `top` best plans that the solver finds.

    Raise what `Forecaster.of` and `Forecaster.best` raise.
    """
    if plan is not None:
        return (forecaster.of(plan),)
    text = "Solving for the best plans of every layout and packing"
    listener(PhaseBegan(phase=Phase.PREDICTION, text=text))
    return forecaster.best(top)


def named_plan(text: str, database_url: str | None, listener: Listener = unheard) -> Plan:
    """Return the plan in a file, or the tried plan whose id begins with a text. Raise PredictError for a file.

    The `listener` gets how well a tried plan is known.
    """
    if is_plan_file(text):
        return read_plan(Path(text))
    with open_store(database_url) as store:
        tried = store.find_plan(text)
    listener(Note(text=known_text(tried)))
    return tried.plan
