"""The end of a training: the model, or the adapter to it that was trained, in a folder of its own."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trials.errors import TrialsError, Unwritable
from trials.job import TrainingSection
from trials.tasks.session import Session
from trials.tasks.training.checkpoint import add_settings, save_model
from trials.tasks.training.output import MODEL_FOLDER, TrainingRecord, checkpoint_folder, partial_folder
from trials.units import number_of


def check_writing(session: Session, output: Path, record: TrainingRecord) -> None:
    """Write all of the model but its weights, and remove it, before the first step; only rank 0 writes.

    Raise Unwritable where that fails, as it would at the end.
    """
    if session.coordinates.rank:
        return
    _, add = _writers(session.request.job.training)
    partial = partial_folder(output / MODEL_FOLDER, record)
    with _explained("the trained model could not be written at the end; correct the files of model.path"):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        add(session, partial)
        shutil.rmtree(partial)


def write_model(session: Session, output: Path, record: TrainingRecord, steps: int) -> None:
    """Write the trained model after the checkpoint of the last step; every rank must call it.

    Raise Unwritable where that fails, with how to get the model from the checkpoint.
    """
    with _explained(
        f"all {number_of(steps, 'step')} are done and in {checkpoint_folder(output, steps)}, but the model could not "
        "be written; launch again: the same command writes it from there"
    ):
        save_result(session, output / MODEL_FOLDER, record, steps)


def save_result(session: Session, folder: Path, record: TrainingRecord, steps: int) -> None:
    """Write the trained model, or the adapter to it that was trained; every rank must call it."""
    save, _ = _writers(session.request.job.training)
    save(session, folder, record, steps)


def _writers(training: TrainingSection) -> tuple[Callable[..., None], Callable[[Session, Path], None]]:
    """Return what writes the model, or the adapter, and what writes all of it but the weights."""
    if training.lora.rank:
        from trials.tasks.training import adapter  # noqa: PLC0415

        return adapter.save_adapter, adapter.add_settings
    return save_model, add_settings


@contextmanager
def _explained(text: str) -> Iterator[None]:
    """Raise Unwritable with the text for whatever fails: no fault may leave a user without a way to the model."""
    try:
        yield
    except Unwritable:  # whose message says how to go on
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, TrialsError) else f"{type(error).__name__}: {error}"
        raise Unwritable(f"{text} ({reason})") from error
