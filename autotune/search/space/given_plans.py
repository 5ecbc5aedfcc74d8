"""Plans that a job names by their files: the one that trainings use now, and those to try first."""

import logging
from pathlib import Path

from autotune.errors import JobError, PlanNotValid, PredictError
from autotune.plan_check import check_plan
from autotune.plan_file import read_plan
from autotune.search.space.capacities import holds_all
from autotune.workload import Prepared
from trials import plugins
from trials.data.packers import PACKERS
from trials.errors import DataError, InvalidPlan, UnknownName
from trials.job import SearchSection
from trials.model.cut import check_layers
from trials.plan import Padded, Plan
from trials.units import number_of

_log = logging.getLogger(__name__)


def current_plan(prepared: Prepared) -> Plan | None:
    """Read the plan that `search.current_plan` names; None where it names none.

    Raise JobError for a plan that is not one of this job, or that would train on fewer samples.
    """
    path = prepared.job.search.current_plan
    return None if path is None else _given(prepared, path, "search.current_plan")


def queued_plans(prepared: Prepared) -> dict[str, Plan]:
    """Read the plans of `search.queue`, by their keys in the job. Raise JobError as above, and for equal ones."""
    found: dict[str, Plan] = {}
    for number, path in enumerate(prepared.job.search.queue):
        key = f"search.queue[{number}]"
        plan = _given(prepared, path, key)
        if same := [other for other, known in found.items() if known == plan]:
            raise JobError(f"{key}: {path} has plan {plan.id}, like {same[0]}; remove one of them")
        found[key] = plan
    return found


def check_readable(search: SearchSection) -> None:
    """Raise JobError for a plan that cannot be read, before anything is known of the devices and the data."""
    current = () if search.current_plan is None else (("search.current_plan", search.current_plan),)
    for key, path in (*current, *((f"search.queue[{number}]", each) for number, each in enumerate(search.queue))):
        _read(path, key)


def _read(path: Path, key: str) -> Plan:
    try:
        return read_plan(path)
    except PredictError as error:
        raise JobError(f"{key}: {error}") from error


def _given(prepared: Prepared, path: Path, key: str) -> Plan:
    """Read the plan in the file that this key of the job names. Raise JobError."""
    workload = prepared.workload
    model, devices = workload.model, workload.hardware.devices
    plan = _read(path, key)
    try:
        check_layers(plan, vision_layers=model.vision_layers, language_layers=model.language_layers, dtype=model.dtype)
        for level in () if isinstance(plan.packing, Padded) else plan.packing.levels:
            plugins.load(PACKERS, level.packer)
    except (InvalidPlan, UnknownName) as error:
        raise JobError(f"{key}: {error}") from error
    if plan.layout.world_size != devices:
        raise JobError(
            f"{key}: {path} is a plan for {number_of(plan.layout.world_size, 'device')}, not {devices}; change its "
            "layout, or hardware.devices"
        )
    try:
        check_plan(prepared, plan)
    except PlanNotValid as error:
        raise JobError(f"{key}: {error}") from error
    packing, index = plan.packing, prepared.index
    if not isinstance(packing, Padded) and holds_all(workload):
        last = packing.levels[-1]
        lost = int(((index.vision_units > last.qv) | (index.text_tokens > last.qt)).sum())
    else:
        lost = 0
    if lost:
        raise JobError(
            f"{key}: {path} has packs that are too small for {number_of(lost, 'sample')}, which "
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
            "search.current_plan: a step of %s has %.0f samples on average, a short last one included, where "
            "training.global_batch_samples is %d, so that it would learn otherwise than the other plans and is not "
            "run; set training.global_batch_samples to the samples of your steps: where another trainer's batch counts "
            "packs, it is that number times the samples of one, which `autotune pack JOB` shows for their length as "
            "--qt",
            prepared.job.search.current_plan,
            epoch.batch_samples,
            prepared.job.training.global_batch_samples,
        )
