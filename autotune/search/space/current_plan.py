"""The plan that trainings use now, with which a search is compared."""

import logging

from autotune.errors import JobError, PlanNotValid, PredictError
from autotune.plan_check import check_plan
from autotune.plan_file import read_plan
from autotune.search.space.feasible import holds_all
from autotune.workload import Prepared
from trials import plugins
from trials.data.packers import PACKERS
from trials.errors import DataError, InvalidPlan, UnknownName
from trials.plan import Padded, Plan
from trials.units import number_of

_log = logging.getLogger(__name__)


def current_plan(prepared: Prepared) -> Plan | None:
    """Read the plan that `search.current_plan` names; None where it names none.

    Raise JobError for a plan that is not one of this job, or that would train on fewer samples.
    """
    path, workload = prepared.job.search.current_plan, prepared.workload
    model = workload.model
    if path is None:
        return None
    try:
        plan = read_plan(path)
        plan.check(vision_layers=model.vision_layers, language_layers=model.language_layers, dtype=model.dtype)
        for level in () if isinstance(plan.packing, Padded) else plan.packing.levels:
            plugins.load(PACKERS, level.packer)
    except (PredictError, InvalidPlan, UnknownName) as error:
        raise JobError(f"search.current_plan: {error}") from error
    devices = workload.hardware.devices
    if plan.layout.world_size != devices:
        raise JobError(
            f"search.current_plan: {path} is a plan for {number_of(plan.layout.world_size, 'device')}, not {devices}"
        )
    try:
        check_plan(prepared, plan)
    except PlanNotValid as error:
        raise JobError(f"search.current_plan: {error}") from error
    packing, index = plan.packing, prepared.index
    if not isinstance(packing, Padded) and holds_all(workload):
        last = packing.levels[-1]
        lost = int(((index.vision_units > last.qv) | (index.text_tokens > last.qt)).sum())
    else:
        lost = 0
    if lost:
        raise JobError(
            f"search.current_plan: {path} has packs that are too small for {number_of(lost, 'sample')}, which "
            f"data.oversize: {workload.oversize} does not train; raise its qv and qt, or set data.oversize: own-pack"
        )
    return plan


def warn_of_batch(prepared: Prepared, plan: Plan) -> None:
    """Log a warning where a step of the plan has other samples than the job asks for: it would learn otherwise."""
    try:
        epoch = prepared.epoch(plan.packing, plan.layout.data)
    except (InvalidPlan, DataError):  # its trial is rejected for the same reason
        return
    if not epoch.keeps_batch:
        _log.warning(
            "search.current_plan: a step of %s has about %.0f samples, where training.global_batch_samples is %d, so "
            "that it learns otherwise than the other plans; set training.global_batch_samples to the samples of your "
            "steps: where another trainer's batch counts packs, it is that number times the samples of one, which "
            "`autotune pack JOB` shows for their length as --qt",
            prepared.job.search.current_plan,
            epoch.batch_samples,
            prepared.job.training.global_batch_samples,
        )
