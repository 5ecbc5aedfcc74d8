"""Continuation of a training with another plan."""

from pathlib import Path

from autotune.errors import PlanNotValid
from autotune.events import Listener, Note
from autotune.plan_check import check_plan
from autotune.plan_choice import binding, choose_plan
from autotune.results.known_plan import KnownPlan
from autotune.workbench import Workbench
from autotune.workload import Prepared
from storage.errors import UnknownRecord
from trials.errors import DataError, InvalidPlan
from trials.model.cut import check_layers
from trials.plan import Plan
from trials.tasks.request import Training
from trials.tasks.training.output import (
    RECORD_FILE,
    PlanChange,
    TrainingRecord,
    check_fixed_settings,
    has_checkpoint_after,
    read_record,
)
from trials.tasks.training.settings import training_settings


def plan_to_continue(bench: Workbench, chosen: KnownPlan, listener: Listener) -> tuple[KnownPlan, bool]:
    """Return the plan with which a training goes on that may have been tuned again, and whether it is a change.

    That is the `chosen` one, unless the training in the output folder had it before a change, or failed to change to
    it: then it keeps its own.
    """
    record = read_record(bench.prepared.job.training.output / RECORD_FILE)
    if record is None or record.settings.plan == chosen.plan.id:
        return chosen, False
    if (why := why_kept(record, chosen.plan)) is None:
        return chosen, True
    listener(Note(text=f"{why}: it keeps plan {record.settings.plan}"))
    return _own_plan(bench, record.plan, listener), False


def why_kept(record: TrainingRecord, plan: Plan) -> str | None:
    """Return why a training that may be tuned again keeps its own plan; None where it may have this one."""
    if plan.id == record.settings.plan:
        return None
    if plan.id in record.failed:
        return f"The launch of plan {plan.id} failed in this training"
    if plan.id in {change.plan.id for change in record.changes}:
        return f"The training had plan {plan.id} before its plan was changed"
    return None


def _own_plan(bench: Workbench, plan: Plan, listener: Listener) -> KnownPlan:
    now, output = bench.prepared.workload, bench.prepared.job.training.output
    return choose_plan(bench.store, now, plan, listener, output, binds=binding(bench.prepared))


def plan_of_training(bench: Workbench, chosen: KnownPlan, listener: Listener) -> KnownPlan:
    """Return the plan of the training in the output folder, which a later search does not change, else `chosen`."""
    record = read_record(bench.prepared.job.training.output / RECORD_FILE)
    if record is None or record.settings.plan == chosen.plan.id:
        return chosen
    if (own := _runnable(bench, record.plan, listener)) is None:
        return chosen  # the refusal of which says how to go on
    listener(
        Note(
            text=f"The training goes on with its plan {own.plan.id}, not with {chosen.plan.id}, to which "
            f"`autotune launch JOB --resume-with {chosen.plan.id}` changes it"
        )
    )
    return own


def plan_begun(bench: Workbench, listener: Listener) -> KnownPlan | None:
    """Return the plan of the training in the output folder; None without one, and where it cannot run here."""
    record = read_record(bench.prepared.job.training.output / RECORD_FILE)
    return None if record is None else _runnable(bench, record.plan, listener)


def _runnable(bench: Workbench, plan: Plan, listener: Listener) -> KnownPlan | None:
    """Return the plan that a training has; None where it cannot run here."""
    try:
        found = _own_plan(bench, plan, listener)
        check_plan(bench.prepared, found.plan)
    except (PlanNotValid, UnknownRecord):
        return None
    return found


def check_begun(prepared: Prepared) -> None:
    """Raise OutputTaken where no plan can continue the training in the output folder: its data or the like differ."""
    output = prepared.job.training.output
    if (record := read_record(output / RECORD_FILE)) is not None:
        request = prepared.request(record.plan, Training(output=output))
        check_fixed_settings(output, training_settings(request, prepared.index))


def untried_change(output: Path) -> PlanChange | None:
    """Return the last change of plan of the training in `output`; None unless the new plan has no checkpoint yet."""
    record = read_record(output / RECORD_FILE)
    if record is None or not record.changes or has_checkpoint_after(output, record.changes[-1].steps):
        return None
    return record.changes[-1]


def plan_to_replace(prepared: Prepared, plan: Plan) -> Plan | None:
    """Return the plan of the training in the output folder that `plan` replaces; None where both are the same.

    Raise PlanNotValid where there is no training, and for a plan that cannot train the model on the data.
    """
    output, model = prepared.job.training.output, prepared.workload.model
    record = read_record(output / RECORD_FILE)
    if record is None:
        raise PlanNotValid(
            f"training.output {output} holds no training that plan {plan.id} could continue; start one with "
            f"`autotune launch JOB --plan {plan.id}`"
        )
    if record.settings.plan == plan.id:
        return None
    try:
        check_layers(plan, vision_layers=model.vision_layers, language_layers=model.language_layers, dtype=model.dtype)
        prepared.epoch(plan.packing, plan.layout.data)
    except (InvalidPlan, DataError) as error:
        raise PlanNotValid(f"plan {plan.id} cannot continue the training in {output}: {error}") from error
    return record.plan
