"""The command that predicts plans without running them."""

from pathlib import Path

from autotune.cli.context import Options
from autotune.forecast.cluster import ClusterOptions
from autotune.forecast.forecast_report import forecast_document, forecast_text
from autotune.forecast.job_forecasts import forecaster_of, forecasts, named_plan
from autotune.job_file import JobFile
from autotune.report.charts.gantt import step
from autotune.report.picture import check_picture, write_picture


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
        check_picture(picture)
    job = file.job
    url = options.database_url(job.database)
    chosen = None if plan is None else named_plan(plan, url, options.display)
    forecaster = forecaster_of(job, cluster_options, url, options.display)
    found = forecasts(forecaster, chosen, top, options.display)
    if picture:
        first = found[0]
        write_picture(picture, step(first.timeline, first.prediction.stage_bytes, first.memory_limit_bytes))
        options.display.show(f"Wrote the plot to {picture}")
    options.give(lambda: forecast_document(forecaster, found), lambda: forecast_text(forecaster, found))
