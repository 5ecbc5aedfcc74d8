"""The command that recommends devices and plans without any device."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.advice.data_sheets import DATA_SHEETS, unknown_device
from autotune.cli.context import Options, check_model_and_data
from autotune.errors import JobError
from autotune.events import Listener, Note
from autotune.job_file import JobFile, job_of_values
from storage.errors import DatabaseUnavailable
from storage.reading import read_store

_KEYS = ("model.", "data.", "evaluation.", "training.", "hardware.memory_limit")
"""Beginnings of the keys of a job that change what is recommended."""


def recommend_devices(
    options: Options,
    model: str | JobFile,
    data: Sequence[Path],
    *,
    device: str,
    devices: Sequence[int],
    deadline: str | None,
    price: float | None,
    changes: Sequence[str],
) -> None:
    """Show what is recommended for a job, or for a model and data with these changes of a job's values."""
    for change in changes:
        if not change.startswith(_KEYS):
            raise JobError(f"--set {change}: a recommendation depends on {', '.join(_KEYS)} alone; leave it out")
    if isinstance(model, JobFile):
        job = model.job
    else:
        job = job_of_values(job_values(model, [str(path) for path in data]), changes)
    database = options.database_url(job.database)
    _check_device(device, database, options.display)
    check_model_and_data(job)
    # They import torch, which takes seconds.
    from autotune.advice.recommendation_report import recommendation_document, recommendation_text
    from autotune.library.recommend import recommend

    found = recommend(
        job,
        device=device,
        devices=devices,
        deadline=deadline,
        database=database,
        listener=options.display,
    )
    options.give(lambda: recommendation_document(found, price), lambda: recommendation_text(found, price))


def job_values(model: str, data: Sequence[str]) -> Mapping[str, Any]:
    """Return the sections of a job for a model, of which no weights are needed, and annotation files."""
    return {
        "model": {"path": model, "weights": "random"},
        "data": {"sources": [{"path": each} for each in data]},
    }


def _check_device(name: str, database_url: str | None, listener: Listener) -> None:
    """Raise RecommendError for a device that has no data sheet, and no profile in the database."""
    if name.lower() in DATA_SHEETS:
        return
    profiled: list[str] = []
    try:
        with read_store(database_url) as store:
            if store.layer_profiles(hardware_name=name):
                return
            profiled = [each.hardware.device_name for each in store.layer_profiles()]
    except DatabaseUnavailable as error:
        listener(Note(text=f"Nothing that was measured is known: {error}"))
    raise unknown_device(name, profiled)
