"""The command that predicts plans without running them."""

from pathlib import Path

from autotune.cli.context import Options
from autotune.events import Phase, PhaseBegan
from autotune.forecast.cluster import ClusterOptions, cluster_of_file, cluster_of_store
from autotune.forecast.forecast import Forecast, Forecaster
from autotune.forecast.forecast_report import forecast_document, forecast_text
from autotune.forecast.plot import check_plot, plot
from autotune.job_file import JobFile
from autotune.known_plan import known_text
from autotune.plan_file import is_plan_file, read_plan
from storage.store import open_store
from trials.job import Job
from trials.model.identity import path_digest
from trials.model.shape import model_shape
from trials.plan import Plan


def predict_job(
    options: Options,
    file: JobFile,
    cluster_options: ClusterOptions,
    *,
    plan: str | None,
    top: int,
    picture: Path | None,
) -> None:
    if picture:
        check_plot(picture)
    job = file.load()
    chosen = None if plan is None else _plan(options, job, plan)
    shape = model_shape(job.model, job.training)
    if profile := cluster_options.profile_file:
        cluster = cluster_of_file(job, shape, profile, cluster_options)
    else:
        with open_store(options.database_url(job.database)) as store:
            store.adopt_model(shape, path_digest(job.model))
            cluster = cluster_of_store(job, shape, store, cluster_options)
    options.display(PhaseBegan(phase=Phase.LENGTHS, text="Reading the data"))
    forecaster = Forecaster(job, shape, cluster, options.display)
    if cluster_options.profile_file is None:
        with open_store(options.database_url(job.database)) as store:
            trials = store.comparable_trials(forecaster.workload)
        if trials:
            options.display(PhaseBegan(phase=Phase.PREDICTION, text="Learning from trials"))
            forecaster.learn(trials)
    if chosen is not None:
        found: tuple[Forecast, ...] = (forecaster.of(chosen),)
    else:
        text = "Solving for the best plans of every layout and packing"
        options.display(PhaseBegan(phase=Phase.PREDICTION, text=text))
        found = forecaster.best(top)
    if picture:
        plot(found[0], picture)
        options.display.tell(f"Wrote the plot to {picture}")
    options.give(lambda: forecast_document(forecaster, found), lambda: forecast_text(forecaster, found))


def _plan(options: Options, job: Job, text: str) -> Plan:
    if is_plan_file(text):
        return read_plan(Path(text))
    with open_store(options.database_url(job.database)) as store:
        tried = store.find_plan(text)
    options.tell(known_text(tried))
    return tried.plan
