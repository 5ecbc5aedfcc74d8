"""The steps of a training that is in the output folder already, next to those of the job."""

import math

from autotune.errors import JobError
from autotune.workload import Prepared
from trials.arrays import Ints
from trials.data.epoch import Epoch
from trials.data.order import epoch_order
from trials.plan import Plan
from trials.tasks.training.course import curriculum_of, set_course
from trials.tasks.training.output import RECORD_FILE, has_checkpoint_after, read_record
from trials.units import number_of


def check_steps(prepared: Prepared, plan: Plan) -> None:
    """Raise JobError for a job with fewer steps than the training in its output folder has been trained.

    Nothing is built where the job has as many epochs and steps as the training had before.
    """
    training = prepared.job.training
    record = read_record(training.output / RECORD_FILE)
    if record is None:
        return
    before = record.settings
    if training.epochs >= before.epochs and _most(training.max_steps) >= _most(before.max_steps):
        return
    curriculum = curriculum_of(training, prepared.index)
    course = set_course(record.changes, plan, training.epochs, _Epochs(prepared), curriculum)
    total = min(course.steps, training.max_steps or course.steps)
    if has_checkpoint_after(training.output, total):
        end = "epochs" if total == course.steps else "max_steps"
        raise JobError(
            f"training.output {training.output} has checkpoints beyond the {number_of(total, 'step')} of "
            f"training.{end}: {getattr(training, end)}; raise it, or name another training.output"
        )


def _most(steps: int | None) -> float:
    return math.inf if steps is None else steps


class _Epochs:
    """The epochs as the ranks build them."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def order(self, number: int) -> Ints:
        return epoch_order(self._prepared.index, self._prepared.job.training.seed, number)

    def build(self, number: int, plan: Plan, order: Ints | None) -> Epoch:
        shown = self.order(number) if order is None else order
        return self._prepared.epoch(plan.packing, plan.layout.data, number, shown)
