"""Evaluations of a training: the loss on held-out samples. The state of the training does not change."""

import math
import time
from collections.abc import Callable, Iterator, Set
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from deepspeed import comm

from trials.data.epoch import Epoch, EpochSettings, build_epoch
from trials.data.index import DatasetIndex
from trials.data.readable import check_readable
from trials.errors import DataError, NotFinite
from trials.model.trained import highest_learning_rate
from trials.tasks.session import Session, not_finite
from trials.tasks.training.progress import Evaluated, append_line, read_lines
from trials.tasks.training.schedule import Schedule

_CONTINUES = "The next launch continues from the last checkpoint, if there is one"


class Evaluator:
    """The held-out samples of a training, packed by its plan, and the steps after which they are evaluated."""

    def __init__(self, session: Session, progress: Path, epoch_ends: Set[int], total: int, schedule: Schedule) -> None:
        """`epoch_ends` are the last steps of the epochs, `total` that of the training. Every rank must call it."""
        self._session = session
        self._progress = progress
        self._schedule = schedule
        self._ends, self._total = epoch_ends, total
        held_out = session.request.held_out
        self._epoch = _packed(session, DatasetIndex.load(held_out)) if held_out else None

    def check_files(self) -> None:
        """Raise DataError where most of some samples of a file of `evaluation.sources` cannot be read here.

        Samples that are held out of `data.sources` are in the files that are trained on.
        """
        if self._epoch is not None and self._session.request.job.evaluation.sources is not None:
            check_readable(self._epoch.index, self._session.encoder)

    def catch_up(self, step: int, stops: Callable[[], bool]) -> bool:
        """Evaluate a training that resumes after `step` if an earlier launch ended before it could; see `run`."""
        if self._epoch is None:
            return True
        # Rank 0 reads the file for all: a shared folder may show others an older state, and all must agree.
        found = torch.zeros(1, device=self._session.device)
        if self._session.coordinates.rank == 0:
            found += any(isinstance(line, Evaluated) and line.step == step for line in read_lines(self._progress))
        comm.broadcast(found, src=0)
        return bool(found) or self.run(step, stops)

    def run(self, step: int, stops: Callable[[], bool]) -> bool:
        """Evaluate where `step` has an evaluation; every rank must call it.

        `stops` is called on every rank, between packs, and has the same result on all. Return False when it stopped
        the evaluation. Raise NotFinite for a loss that is not finite.
        """
        epoch = self._epoch
        if epoch is None or not self._is_due(step):
            return True
        start = time.perf_counter()
        remedy = (
            f"If there is a checkpoint-{step}, the next launch evaluates it again; rename it to continue from the one "
            "before"
        )
        with explained(self._session, self._schedule, step, remedy):
            found = _mean_loss(self._session, epoch, stops)
        if found is None:
            return False
        loss, blank = found
        if self._session.coordinates.rank == 0:
            line = Evaluated(
                step=step,
                of=self._total,
                evaluation_loss=loss,
                seconds=time.perf_counter() - start,
                samples=len(epoch.packs.samples) - blank,
                blank_samples=blank,
            )
            append_line(self._progress, line)
        return True

    def _is_due(self, step: int) -> bool:
        every = self._session.request.job.evaluation.every
        return step == self._total or (step > 0 and step % every == 0 if every else step in self._ends)


def _packed(session: Session, index: DatasetIndex) -> Epoch:
    """Return the samples in the packs of the plan. None is skipped: the loss is the same under every plan."""
    job, plan = session.request.job, session.request.plan
    settings = EpochSettings.of_job(job, session.request.weights)
    settings = replace(settings, seed=job.evaluation.seed, oversize="own-pack")
    return build_epoch(index, plan.packing, settings, data_parallel=plan.layout.data)


def _mean_loss(session: Session, epoch: Epoch, stops: Callable[[], bool]) -> tuple[float, int] | None:
    """Return (mean cross-entropy over the target tokens of all packs, number of samples that cannot be read).

    Those do not count in the mean. Return None when `stops` is True before the end. Raise DataError where no sample
    can be read.
    """
    total, targets = 0.0, 0
    steps = range(epoch.steps)
    with _set_aside(session), closing(session.batches(epoch, steps)) as batches:
        for step in steps:
            if stops():
                return None
            unweighted = (replace(batch, weights=None) for batch in batches)
            found = session.engine.evaluate(unweighted, len(epoch.rows(step)))
            total, targets = total + found[0], targets + found[1]
        blank = len(session.take_blank())
    if not targets:
        raise DataError("no sample can be read to evaluate the model on; correct the files that the log names")
    if not math.isfinite(total):
        raise not_finite("the evaluation loss", total / targets)
    return total / targets, blank


@contextmanager
def _set_aside(session: Session) -> Iterator[None]:
    """Restore the blank samples, the latest ones, and the stopwatch."""
    blank, latest = session.blank, session.latest
    session.blank, session.latest = {}, latest.anew()
    yield
    session.blank, session.latest = blank, latest
    session.engine.stopwatch.read()


def check_weights(session: Session, epoch: Epoch) -> None:
    """Run one pack of `epoch` forward on each data rank; raise NotFinite when the loss is not finite.

    Weights that have diverged can themselves be finite. A sample that can no longer be read is blank here: it must not
    prevent a checkpoint.
    """
    # Without workers, whose start takes longer than loading one pack.
    with _set_aside(session), closing(session.batches(epoch, (0,), workers=0, must_read=False)) as batches:
        loss, _ = session.engine.evaluate(batches, 1)
    if not math.isfinite(loss):
        raise not_finite("the loss after this step", loss)


@contextmanager
def explained(session: Session, schedule: Schedule, step: int, remedy: str = _CONTINUES) -> Iterator[None]:
    """Add to a NotFinite the step, its learning rate and how the next launch continues."""
    try:
        yield
    except NotFinite as error:
        training, chain = session.request.job.training, session.engine.stage.chain
        rate = highest_learning_rate(training, chain) * schedule.factor(step)
        raise NotFinite(f"step {step}, learning rate {rate:.3g}: {error}. {remedy}") from error
