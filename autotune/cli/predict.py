"""The command that predicts plans without running them."""

from pathlib import Path

from autotune.cli.context import Options
from autotune.cli.progress import reading_progress
from autotune.forecast.cluster import Cluster, ClusterOptions, cluster_of_file, cluster_of_store
from autotune.forecast.forecast import Forecast, Forecaster
from autotune.forecast.forecast_report import forecast_document, forecast_text
from autotune.forecast.plot import check_plot, plot
from autotune.job_file import load_job
from autotune.plan_file import is_plan_file, read_plan
from storage.store import open_store
from trials.job import Job
from trials.model.identity import path_digest
from trials.model.shape import model_shape
from trials.plan import Plan
from trials.workload import ModelShape


def predict_job(
    options: Options, path: Path, cluster_options: ClusterOptions, *, plan: str | None, top: int, picture: Path | None
) -> None:
    if picture:
        check_plot(picture)
    job = load_job(path)
    chosen = None if plan is None else _plan(options, job, plan)
    shape = model_shape(job.model)
    cluster = _cluster(options, job, shape, cluster_options)
    options.tell("Looking at the data")
    with reading_progress(options) as progress:
        forecaster = Forecaster(job, shape, cluster, progress)
    if cluster_options.profile_file is None:
        _learn(options, forecaster)
    found = _forecasts(options, forecaster, chosen, top)
    if picture:
        plot(found[0], picture)
        options.tell(f"Wrote the plot to {picture}")
    options.give(forecast_document(forecaster, found), lambda: forecast_text(forecaster, found))


def _plan(options: Options, job: Job, text: str) -> Plan:
    if is_plan_file(text):
        return read_plan(Path(text))
    with open_store(options.database_url(job.database)) as store:
        return store.find_plan(text).plan


def _cluster(options: Options, job: Job, shape: ModelShape, cluster_options: ClusterOptions) -> Cluster:
    if file := cluster_options.profile_file:
        return cluster_of_file(job, shape, file, cluster_options)
    with open_store(options.database_url(job.database)) as store:
        store.adopt_model(shape, path_digest(job.model))
        return cluster_of_store(job, shape, store, cluster_options)


def _learn(options: Options, forecaster: Forecaster) -> None:
    with open_store(options.database_url(forecaster.job.database)) as store:
        trials = store.comparable_trials(forecaster.workload)
    if trials:
        options.tell("Learning from trials")
        forecaster.learn(trials)


def _forecasts(options: Options, forecaster: Forecaster, plan: Plan | None, top: int) -> tuple[Forecast, ...]:
    if plan is not None:
        return (forecaster.of(plan),)
    options.tell("Solving for the best plans of every layout and packing")
    return forecaster.best(top)
