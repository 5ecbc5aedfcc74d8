"""What earlier searches on workloads like this one are good for: where to begin."""

import logging
from itertools import pairwise

from autotune.predict.calibration import Lessons
from autotune.search.solver.solver import Solver
from autotune.search.space.space import Space
from storage.nearness import fields_of
from storage.store import Store
from trials import wire
from trials.errors import WireError
from trials.plan import Plan
from trials.workload import Workload

_log = logging.getLogger(__name__)
_PLANS, _LOOKED_AT = 2, 50


def inherited_lessons(store: Store, workload: Workload) -> Lessons | None:
    """What trials of the last search on a workload like this one taught. One of another form counts as none."""
    document = store.lessons(workload)
    if document is None:
        return None
    try:
        return wire.decode(Lessons, document)
    except WireError as error:
        _log.info("the calibration of an earlier search has another format and is not used: %s", error)
        return None


def inherited_plans(store: Store, workload: Workload, space: Space, solver: Solver) -> list[Plan]:
    """Winners of the workloads on such devices that differ least, moved to this model; the nearest first."""
    nearest = store.nearest_plans(fields_of(workload), hardware_name=workload.hardware.device_name, limit=_LOOKED_AT)
    found = (moved(near.best.plan, workload, solver) for near in nearest)
    return list(dict.fromkeys(plan for plan in found if plan is not None and space.point(plan)))[:_PLANS]


def moved(plan: Plan, workload: Workload, solver: Solver) -> Plan | None:
    """The plan itself, or where the model has other layers the same packing and layout with a split in proportion.

    None where nothing of it can be trained here.
    """
    model = workload.model
    vision = sum(stage.vision for stage in plan.stages)
    layers = sum(stage.vision + stage.language for stage in plan.stages)
    if plan.layout.world_size != workload.hardware.devices or not solver.keeps_batch(plan.packing, plan.layout):
        return None
    if (vision, layers) == (model.vision_layers, model.vision_layers + model.language_layers):
        return plan if solver.admits(plan) else _split(solver, plan, layers)
    return _split(solver, plan, layers)


def _split(solver: Solver, plan: Plan, layers: int) -> Plan | None:
    """With ends at the same shares of the chain, and recomputation anew."""
    ends = tuple(round(end * solver.layers / layers) for end in plan.ends)
    if any(start >= end for start, end in pairwise((0, *ends))):
        return None
    return solver.fit(plan.packing, plan.layout, ends)
