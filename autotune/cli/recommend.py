"""The command that recommends devices and plans without any device."""

from collections.abc import Sequence
from pathlib import Path

from autotune.advice.recommendation_report import recommendation_document, recommendation_text
from autotune.cli.context import Options
from autotune.errors import JobError
from autotune.job_file import job_of_values
from autotune.library.recommend import job_values, recommend

_KEYS = ("model.", "data.", "evaluation.", "training.", "hardware.memory_limit")
"""Beginnings of the keys of a job that change what is recommended."""


def recommend_devices(
    options: Options,
    model: str,
    data: Sequence[Path],
    *,
    device: str,
    devices: Sequence[int],
    deadline: str | None,
    price: float | None,
    changes: Sequence[str],
) -> None:
    for missing in (path for path in data if not path.exists()):
        raise JobError(f"{missing}: no such file or folder; give annotation files")
    for change in changes:
        if not change.startswith(_KEYS):
            raise JobError(f"--set {change}: a recommendation depends on {', '.join(_KEYS)} alone; leave it out")
    job = job_of_values(job_values(model, [str(path) for path in data]), changes)
    found = recommend(
        job,
        device=device,
        devices=devices,
        deadline=deadline,
        database=options.database_url(None),
        listener=options.display,
    )
    options.give(lambda: recommendation_document(found, price), lambda: recommendation_text(found, price))
