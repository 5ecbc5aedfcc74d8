"""Checks of a plan before its ranks start: whether it trains the job, and what its steps are."""

import logging
import math

from autotune.dimensions.folds import check_layout
from autotune.errors import JobError, PlanNotValid
from autotune.workload import Prepared, check_curriculum, check_warmup
from trials.arrays import Ints
from trials.data.epoch import Epoch
from trials.data.levels import check_levels
from trials.data.neutral import neutrality
from trials.data.order import epoch_order
from trials.data.packs import samples_above
from trials.errors import InvalidPlan
from trials.model.cut import check_layers
from trials.model.refusals.heads import check_degrees
from trials.model.skeleton import load_config
from trials.plan import Levelled, Plan
from trials.stage import TOWERS
from trials.tasks.training.course import curriculum_of, set_course
from trials.tasks.training.output import RECORD_FILE, has_checkpoint_after, read_record
from trials.units import number_of

_log = logging.getLogger(__name__)


def check_plan(prepared: Prepared, plan: Plan) -> None:
    """Raise PlanNotValid for a plan that needs more devices than the job has, or that does not fit its model."""
    devices = prepared.workload.hardware.devices
    if plan.layout.world_size > devices:
        raise PlanNotValid(
            f"plan {plan.id} needs {plan.layout.world_size} devices, the job has {devices}; raise "
            "hardware.devices, or run `autotune tune JOB` for a plan that fits"
        )
    settings, shape = prepared.job.model, prepared.workload.model
    try:
        check_layers(plan, vision_layers=shape.vision_layers, language_layers=shape.language_layers, dtype=shape.dtype)
        check_layout(plan.layout, prepared.job, prepared.workload.hardware)
        levels = [level for stage in plan.stages for level in stage.recomputed]
        if prepared.job.training.compile and any(level.selective(tower) for level in levels for tower in TOWERS):
            raise InvalidPlan(
                "the compiler decides what compiled layers recompute; use selective 0, or remove training.compile"
            )
        if max(plan.layout.tensor, *plan.packing.degrees) > 1:
            config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
            check_degrees(config.get_text_config(), plan.packing.degrees, plan.layout.tensor)
        if isinstance(plan.packing, Levelled):
            check_levels(prepared.index, plan.packing, skips=prepared.job.data.oversize == "skip")
    except InvalidPlan as error:
        raise PlanNotValid(f"plan {plan.id} cannot train {shape.name}: {error}") from error


def check_samples(prepared: Prepared, plan: Plan) -> None:
    """Raise DataError for a sample above the capacities of the plan under `data.oversize: fail`."""
    samples_above(prepared.index, plan.packing, prepared.job.data.oversize)


def check_first_steps(prepared: Prepared, plan: Plan) -> None:
    """Check the warm-up and the curriculum of a training that begins with this plan; warn of steps unlike random ones.

    Raise JobError for a warm-up longer than the training, or a curriculum of more steps than the plan makes of its
    samples. A training in the output folder that has changed its plan keeps the schedule of the first one.
    """
    record = read_record(prepared.job.training.output / RECORD_FILE)
    if record and record.changes:
        return
    training = prepared.job.training
    if training.warmup >= 1:  # else it is a share of the steps, and no epoch has to be built
        check_warmup(
            training, [prepared.epoch(plan.packing, plan.layout.data, n).steps for n in range(training.epochs)]
        )
    _check_curriculum(prepared, plan)
    epoch = prepared.epoch(plan.packing, plan.layout.data)
    for fault in neutrality(epoch).faults(epoch.settings.mixed):
        _log.warning("plan %s changes what is learned: %s", plan.id, fault)


def _check_curriculum(prepared: Prepared, plan: Plan) -> None:
    """Raise JobError for a curriculum with more steps than the plan fills; warn where these miss the global batch."""
    training, index = prepared.job.training, prepared.index
    curriculum = curriculum_of(training, index)
    if curriculum is None:
        return
    order = epoch_order(index, training.seed, 0)
    short = order[curriculum.samples[order]]
    epoch = prepared.epoch(plan.packing, plan.layout.data, order=short)
    check_curriculum(training, len(short), epoch.steps, f"plan {plan.id}")
    if not epoch.keeps_batch:
        _log.warning(
            "the steps of training.curriculum are off by %.0f %% of training.global_batch_samples: %d, since plan %s "
            "has many short samples in a pack; raise training.curriculum.max_tokens, or take a plan with smaller packs",
            100 * epoch.batch_deviation,
            training.global_batch_samples,
            plan.id,
        )


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
