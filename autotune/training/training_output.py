"""Checks and the lock of the output folder of a training."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from filelock import FileLock, Timeout

from autotune.errors import JobError
from trials.data import formats
from trials.data.records.watched import MEDIA
from trials.job import Job
from trials.tasks.training.output import RECORD_FILE, check_unclaimed, read_record

_LOCK = ".autotune.lock"
_MOST_ENTRIES = 10_000
"""A choice: files of an output folder that are looked at, which take less than a second."""


def check_output(job: Job) -> None:
    """Check, before any work is done, that the training may write to `training.output`. Leaves nothing behind.

    Raise JobError for a folder that cannot be written, that overlaps with the model or the data, or that holds images,
    and for an adapter to random weights, OutputTaken for a folder with other results, and DataError for a source that
    cannot be opened.
    """
    if job.training.lora.rank and job.model.weights == "random":
        raise JobError(
            "training.lora with model.weights: random would train an adapter to weights that are in no folder; set "
            "model.weights: pretrained, or remove training.lora"
        )
    folder = job.training.output
    _check_overlap(job)
    try:
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        # Tried, since permissions do not tell of a file system that is full or read-only.
        with tempfile.TemporaryFile(dir=existing):
            pass
        check_unclaimed(folder)
        _check_media(folder)
    except OSError as error:
        raise _unwritable(folder, error) from error


def _check_overlap(job: Job) -> None:
    """Raise JobError if an input is inside the output, where a training replaces files.

    The output may be inside a folder of images: nothing outside of the output is replaced.
    """
    output = job.training.output.resolve()  # links would hide an overlap
    model = Path(job.model.path).resolve()
    if model.is_dir() and output.is_relative_to(model):
        raise JobError(f"training.output {output} is inside the model's folder {model}; name a folder outside of it")
    files = [file for source in job.sources for file in formats.resolve(source, Path())]
    inputs = {"model": model, **{f"data {file.path}": file.path.resolve() for file in files}}
    # Without `images`, pictures are looked up next to the annotation file, which is checked by itself.
    images = {file.images.resolve() for file in files} - {file.path.resolve().parent for file in files}
    inputs |= {f"images in {folder}": folder for folder in images}
    for what, place in inputs.items():
        if place.is_relative_to(output):
            raise JobError(f"training.output {output} holds the {what}; name a separate folder")


def _check_media(folder: Path) -> None:
    """Raise JobError if a folder in which no training has begun holds images, videos or sounds, at any depth.

    Records name them by any path, so that only reading all records would tell whether they are of the data.
    """
    if read_record(folder / RECORD_FILE):
        return
    files = (Path(place, name) for place, _, names in os.walk(folder) for name in names)
    media = (file for file in islice(files, _MOST_ENTRIES) if file.suffix.lower() in MEDIA)
    if (found := next(media, None)) is not None:
        raise JobError(
            f"training.output {folder} holds {found.relative_to(folder)}, which may be of the data; name an empty or "
            "a new folder"
        )


@contextmanager
def held(output: Path) -> Iterator[None]:
    """Lock the folder for this training; make it if it is absent. Raise JobError while another training has it."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = FileLock(output / _LOCK)
        lock.acquire(timeout=0)
    except Timeout:
        raise JobError(f"another training writes to training.output {output}; wait for it, or name another") from None
    except OSError as error:
        raise _unwritable(output, error) from error
    try:
        yield
    finally:
        lock.release()


def _unwritable(folder: Path, error: OSError) -> JobError:
    return JobError(f"training.output {folder} cannot be written ({error.strerror}); name another folder")
