"""The command that predicts plans without running them."""

from pathlib import Path

from autotune.cli.context import Options
from autotune.forecast.cluster import ClusterOptions
from autotune.forecast.forecast_report import forecast_document, forecast_text
from autotune.forecast.job_forecasts import forecasts
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
    url = options.database_url(file.job.database)
    forecaster, found = forecasts(file.job, cluster_options, url, options.display, plan=plan, top=top)
    if picture:
        first = found[0]
        write_picture(picture, step(first.timeline, first.prediction.stage_bytes, first.memory_limit_bytes))
        options.display.show(f"Wrote the plot to {picture}")
    options.give(lambda: forecast_document(forecaster, found), lambda: forecast_text(forecaster, found))
