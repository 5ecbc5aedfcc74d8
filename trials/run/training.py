"""The full training on one rank: every step of every epoch, with checkpoints and the final model."""

import time
from collections.abc import Iterator
from pathlib import Path

from trials import wire
from trials.data.epoch import Epoch
from trials.errors import TrialsError
from trials.run.checkpoint import TrainingState, latest_checkpoint, load_checkpoint, save_checkpoint, save_model
from trials.run.progress import PROGRESS_FILE, Progress
from trials.run.report import TrainingReport
from trials.run.request import Training
from trials.run.session import Session

MODEL_FOLDER = "model"


def run_training(session: Session, task: Training) -> TrainingReport:
    """Trains to the end, or to `task.max_steps`. Goes on at the exact step after the last checkpoint."""
    done = _resume(session, task.output)
    counts = [session.epoch(number).steps for number in range(session.request.job.training.epochs)]
    total = sum(counts)
    last = min(total, task.max_steps or total)
    first_of_epoch = 0
    for number, count in enumerate(counts):
        wanted = range(max(0, done - first_of_epoch), min(count, last - first_of_epoch))
        for record in _run_steps(session, session.epoch(number), wanted, first_of_epoch, total):
            done = record.step
            _write_progress(session, task.output, record)
            if _is_due(session, done, first_of_epoch + count, last):
                save_checkpoint(session, task.output, _state(session, done))
        first_of_epoch += count
    if done < total:
        return TrainingReport(steps=done, finished=False, model=None, blank_samples=session.blank_samples)
    save_model(session, task.output / MODEL_FOLDER)
    return TrainingReport(
        steps=done, finished=True, model=task.output / MODEL_FOLDER, blank_samples=session.blank_samples
    )


def _run_steps(session: Session, epoch: Epoch, numbers: range, before: int, total: int) -> Iterator[Progress]:
    batches = session.batches(epoch, numbers)
    for number in numbers:
        step = epoch.step(number)
        start = time.perf_counter()
        loss = session.step(batches, step)
        seconds = time.perf_counter() - start
        yield Progress(step=before + number + 1, of=total, loss=loss, seconds=seconds, samples=step.samples)


def _write_progress(session: Session, output: Path, record: Progress) -> None:
    if session.seat.rank == 0:
        with (output / PROGRESS_FILE).open("a") as file:
            file.write(wire.encode(record) + "\n")


def _is_due(session: Session, done: int, end_of_epoch: int, last: int) -> bool:
    every = session.request.job.training.checkpoint_every
    return done in (end_of_epoch, last) or (every is not None and done % every == 0)


def _state(session: Session, done: int) -> TrainingState:
    return TrainingState(steps=done, plan=session.request.plan.id, data=session.index.digest)


def _resume(session: Session, output: Path) -> int:
    """Steps already done. Raises TrialsError for a checkpoint of another plan or dataset."""
    output.mkdir(parents=True, exist_ok=True)
    found = latest_checkpoint(output)
    if found is None:
        return 0
    folder, state = found
    for what, then, now in (
        ("plan", state.plan, session.request.plan.id),
        ("data", state.data, session.index.digest),
    ):
        if then != now:
            raise TrialsError(
                f"{folder} was written with {what} {then}, not {now}; launch that one or give a new output"
            )
    load_checkpoint(session, folder, state)
    return state.steps
