"""The full training on one rank: every step of every epoch, with checkpoints and the final model."""

import hashlib
import math
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from deepspeed import comm

from trials import wire
from trials.arrays import Ints
from trials.data.loss_weights import sample_weights
from trials.data.readable import check_readable
from trials.engine.base import BACKWARD, FORWARD, LOAD
from trials.engine.group import wait_for_all
from trials.errors import OutputTaken, TrialsError
from trials.grid import RankCoordinates
from trials.job import LossWeighting, TrainingSection
from trials.model.trained import highest_learning_rate
from trials.plan import Layout
from trials.tasks.answer import TrainingReport
from trials.tasks.request import Training
from trials.tasks.session import Session, not_finite
from trials.tasks.stop import Stop
from trials.tasks.training.checkpoint import load_checkpoint, save_checkpoint
from trials.tasks.training.course import Course, curriculum_of, follow_pace, set_course
from trials.tasks.training.evaluation import Evaluator, check_weights, explained
from trials.tasks.training.output import (
    MODEL_FOLDER,
    RECORD_FILE,
    OpenedOutput,
    TrainingRecord,
    checkpoint_folder,
    open_output,
    read_record,
)
from trials.tasks.training.progress import PROGRESS_FILE, Progress, RankTimes, append_line
from trials.tasks.training.schedule import Schedule, schedule_of
from trials.tasks.training.settings import training_settings
from trials.tasks.training.trained_model import check_writing, write_model
from trials.units import number_of

_URGENCY = (None, Stop.AT_CHECKPOINT, Stop.NOW)
_PATIENCE_SECONDS = 60.0
"""As long as NFS may show a folder as it was (`acdirmax`)."""
_PAUSE_SECONDS = 0.5
"""Between two looks."""


def run_training(session: Session, task: Training, asked_to_stop: Callable[[], Stop | None]) -> TrainingReport:
    """Train to the end, or to `task.max_steps`, from the step after the last checkpoint.

    When a rank is `asked_to_stop`, all ranks end after the same step, with a checkpoint.
    """

    def save(steps: int) -> None:
        with explained(session, schedule, steps):
            check_weights(session, first)
            save_checkpoint(session, task.output, opened.record, steps)

    stops = partial(_stops_now, session, asked_to_stop)
    opened = _open(session, task.output)
    done = opened.steps
    training = session.request.job.training
    course, schedule = courses_of(session, opened.record)
    total = min(course.steps, training.max_steps or course.steps)
    first = session.build(0, session.request.plan, None)
    if done:
        _check_end(training, checkpoint_folder(task.output, done), done, course, total)
        load_checkpoint(session, checkpoint_folder(task.output, done), done)
    evaluator = Evaluator(session, task.output / PROGRESS_FILE, course.epoch_ends, total, schedule)
    last = min(total, task.max_steps or total)
    # A folder that cannot be written would otherwise show after hours, at the end.
    check_writing(session, task.output, opened.record)
    if done < last:
        check_readable(session.index, session.encoder)
        evaluator.check_files()
    every = training.checkpoint_every
    _finish(session, task.output, opened, done, total)
    stopped, blank = None if evaluator.catch_up(done, stops) else Stop.NOW, 0
    clock = RankClock(session.request.plan.layout, task.window_steps)
    with closing(run_steps(session, course, range(done, done if stopped else last), schedule)) as steps:
        for record, times, ends_epoch in steps:
            done, blank = record.step, blank + record.blank_samples
            asked = _agreed(session, asked_to_stop) if done < last else None
            is_due = done % every == 0 if every else ends_epoch
            is_saved = is_due or done == last or asked is Stop.NOW
            # AT_CHECKPOINT waits for the next save; NOW makes one.
            stopped = asked if is_saved else None
            window = clock.add(times, is_last=done == last or stopped is not None)
            if session.coordinates.rank == 0:
                append_line(task.output / PROGRESS_FILE, replace(record, window=window))
            if is_saved:
                save(done)
            _finish(session, task.output, opened, done, total)
            # Behind the checkpoint and the model: an evaluation may take long, or fail.
            if stopped is not Stop.NOW and not evaluator.run(done, stops):
                stopped = Stop.NOW
            if stopped:
                if not is_saved:
                    save(done)
                break
    return TrainingReport(
        steps=done,
        finished=done == total,
        model=task.output / MODEL_FOLDER if done == total else None,
        blank_samples=blank,
        stopped=stopped,
    )


def _finish(session: Session, output: Path, opened: OpenedOutput, done: int, total: int) -> None:
    """Write the model behind the last step, unless an earlier launch has."""
    if done == total and not (opened.has_model and opened.steps == done):
        write_model(session, output, opened.record, done)


def _agreed(session: Session, asked_to_stop: Callable[[], Stop | None]) -> Stop | None:
    """Return the most urgent of what the ranks were asked; every rank must call it."""
    return _URGENCY[int(_of_all_ranks(session, (_URGENCY.index(asked_to_stop()),)).max())]


def _stops_now(session: Session, asked_to_stop: Callable[[], Stop | None]) -> bool:
    return _agreed(session, asked_to_stop) is Stop.NOW


def _check_end(training: TrainingSection, checkpoint: Path, done: int, course: Course, total: int) -> None:
    """Raise TrialsError for a checkpoint of a later step than the last."""
    if done > total:
        end = "epochs" if total == course.steps else "max_steps"
        raise TrialsError(
            f"{checkpoint} is beyond the {number_of(total, 'step')} of training.{end}: {getattr(training, end)}; raise "
            "it, or name another training.output"
        )


def _of_all_ranks(session: Session, values: tuple[float, ...]) -> torch.Tensor:
    """Return the values of each rank, [ranks, values]."""
    ranks = session.request.plan.layout.world_size
    found = torch.zeros((ranks, len(values)), dtype=torch.float32, device=session.device)
    found[session.coordinates.rank] = torch.tensor(values)
    comm.all_reduce(found)
    return found.cpu()


def _open(session: Session, output: Path) -> OpenedOutput:
    """Return what rank 0 finds in `output`. It alone verifies the checkpoint, which reads every byte.

    Raise OutputTaken on a rank that does not see the record that rank 0 has written.
    """
    found = torch.zeros(3, dtype=torch.int64, device=session.device)
    if session.coordinates.rank == 0:
        plan = session.request.plan
        opened = open_output(output, training_settings(session.request, session.index), plan)
        found += torch.tensor((opened.steps, opened.has_model, record_digest(opened.record)), device=found.device)
    wait_for_all()
    comm.broadcast(found, src=0)
    steps, has_model, digest = found.tolist()
    return OpenedOutput(record=shared_record(output, digest), steps=steps, has_model=bool(has_model))


def shared_record(output: Path, digest: int, patience_seconds: float = _PATIENCE_SECONDS) -> TrainingRecord:
    """Return the record in `output` once it has the `digest` of the one that rank 0 wrote.

    Raise OutputTaken where it has not after the patience. With the record of another folder, such as a copy on this
    node, this rank would set another course than rank 0.
    """
    end = time.monotonic() + patience_seconds
    record = read_record(output / RECORD_FILE)
    while (record is None or record_digest(record) != digest) and time.monotonic() < end:
        time.sleep(_PAUSE_SECONDS)
        record = read_record(output / RECORD_FILE)
    if record is None or record_digest(record) != digest:
        other = "no" if record is None else "another"
        raise OutputTaken(
            f"training.output {output} is not the folder that rank 0 has opened: it has {other} {RECORD_FILE}; name "
            "one that all nodes share"
        )
    return record


def record_digest(record: TrainingRecord) -> int:
    """Return a digest that fits into an int64: a number of 64 bits, with a sign."""
    return int.from_bytes(hashlib.sha256(wire.encode(record).encode()).digest()[:8], signed=True)


def courses_of(session: Session, record: TrainingRecord) -> tuple[Course, Schedule]:
    """Return the steps of the training, and the schedule of its first plan, at the pace of the later plans."""
    training, changes = session.request.job.training, record.changes
    plans = (*(change.plan for change in changes), session.request.plan)
    curriculum = curriculum_of(training, session.index)
    courses = [
        set_course(changes[:number], plan, training.epochs, session, curriculum) for number, plan in enumerate(plans)
    ]
    schedule = schedule_of(training, [courses[0].steps])
    if changes:
        schedule = replace(schedule, pace=follow_pace(courses, changes, training.max_steps))
    return courses[-1], schedule


def run_steps(
    session: Session, course: Course, wanted: range, schedule: Schedule
) -> Generator[tuple[Progress, torch.Tensor, bool], None, None]:
    """Run the `wanted` steps of the course, counted from 0.

    Yield each, the times of the ranks in it as `RankClock.add` takes them, and whether it ends its epoch.
    """
    training = session.request.job.training
    total = min(course.steps, training.max_steps or course.steps)
    learning_rate = highest_learning_rate(training, session.engine.stage.chain)
    for stretch in course.stretches:
        before = stretch.before
        first, last = max(0, wanted.start - before), min(stretch.steps, wanted.stop - before)
        if first >= last:
            continue
        epoch = session.build(stretch.epoch, stretch.plan, stretch.order)
        # Closed at the end: packs are prepared ahead for steps that a stop leaves out.
        with closing(session.batches(epoch, range(first, last))) as batches:
            for index in range(first, last):
                step = epoch.step(index)
                factor = schedule.factor(before + index + 1)
                session.engine.scale_learning_rates(factor)
                torch.manual_seed(random_seed(session.request.job.training.seed, before + index, session.coordinates))
                start = time.perf_counter()
                with explained(session, schedule, before + index + 1):
                    loss = session.step(batches, step)
                    norm = session.engine.gradient_norm
                    if norm is not None and not math.isfinite(norm):
                        raise not_finite("the gradient norm", norm)
                seconds = time.perf_counter() - start
                parts = session.engine.stopwatch.read()
                passes = parts[FORWARD] + parts.get(BACKWARD, 0.0)
                found = _of_all_ranks(session, (parts.get(LOAD, 0.0), passes, float(len(session.blank))))
                times = found[:, :2]
                lost = session.take_blank() if found[:, 2].any() else []
                progress = Progress(
                    step=before + index + 1,
                    of=total,
                    loss=_of_read(loss, step.targets, [each.targets for each in lost], training.loss_weighting),
                    seconds=seconds,
                    samples=step.samples,
                    learning_rate=learning_rate * factor,
                    data_wait_seconds=times[:, 0].max().item(),
                    text_tokens=step.text_tokens,
                    blank_samples=len(lost),
                    blank_reason=lost[0].reason if lost else "",
                    gradient_norm=norm,
                )
                yield progress, times, stretch.ends_epoch and index + 1 == stretch.steps


def _of_read(loss: float, targets: Ints, lost: Sequence[int], weighting: LossWeighting) -> float:
    """Return the mean loss of the samples that could be read, for the `loss` of a step in which others count as 0.

    `targets` are those of each sample of the step, and `lost` those of each that could not be read.
    """
    total, missing = (sample_weights(each, weighting).sum() for each in (targets, np.array(lost, dtype=np.int64)))
    return float(loss * total / (total - missing)) if missing < total else loss


def random_seed(seed: int, step: int, where: RankCoordinates) -> int:
    """Return the seed of a rank's random numbers in a step, counted from 0: those of dropout, 64 bits.

    Each rank has its own, so that no two masks are alike. Tensor ranks too drop of their own tokens, heads and tiles:
    what they all compute, such as gathered states, has no dropout.
    """
    words = np.random.SeedSequence((seed, step, where.stage, where.data_rank, where.tensor_rank))
    return int(words.generate_state(1, np.uint64)[0])


# Microseconds: the clocks of ranks tell no more, and the lines of a log stay short.
_DIGITS = 6
"""Decimal places of the seconds."""


class RankClock:
    """Sums over the present window of a launch. The first step of the launch warms up, and does not count."""

    def __init__(self, layout: Layout, window_steps: int) -> None:
        self._stages = [layout.grid.coordinates(rank).stage for rank in range(layout.world_size)]
        self._window_steps = window_steps
        self._sums: torch.Tensor | None = None
        self._steps = 0

    def add(self, times: torch.Tensor, *, is_last: bool) -> RankTimes | None:
        """Add a step, [ranks, 2]: seconds of loading and of passes. Return the means of a window that ends with it.

        The last step of a launch, as before a stop, ends its window, which may be shorter than others.
        """
        if self._sums is None:
            self._sums = torch.zeros_like(times, dtype=torch.float64)
            return None
        self._sums += times
        self._steps += 1
        if self._steps < self._window_steps and not is_last:
            return None
        loads, passes = (self._sums / self._steps).round(decimals=_DIGITS).T.tolist()
        self._sums, self._steps = torch.zeros_like(self._sums), 0
        return RankTimes.of(self._stages, loads, passes)
