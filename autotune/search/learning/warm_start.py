"""Where a search begins after searches on similar workloads: their calibration, and their winners."""

import logging
from dataclasses import replace
from itertools import pairwise

from autotune.prediction.calibration import CalibrationState
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
"""Plans that are inherited, and stored winners that are considered for it."""


def inherited_calibration(store: Store, workload: Workload) -> CalibrationState | None:
    """Return the final calibration of the last search on a similar workload; None if none can be read."""
    document = store.calibration_state(workload)
    if document is None:
        return None
    try:
        return wire.decode(CalibrationState, document)
    except WireError as error:
        _log.info("the calibration of an earlier search has another format and is not used: %s", error)
        return None


def inherited_plans(store: Store, workload: Workload, space: Space, solver: Solver) -> list[Plan]:
    """Return the winners of the nearest workloads on this kind of devices, adapted to this model, nearest first."""
    nearest = store.nearest_plans(fields_of(workload), hardware_name=workload.hardware.device_name, limit=_LOOKED_AT)
    found = (moved(near.best.plan, workload, solver) for near in nearest)
    return list(dict.fromkeys(plan for plan in found if plan is not None and space.holds(plan)))[:_PLANS]


def moved(plan: Plan, workload: Workload, solver: Solver) -> Plan | None:
    """Return the plan, or for a model with other layers one of the same packing and layout with a proportional split.

    None where neither can be trained.
    """
    model, plan = workload.model, replace(plan, layout=solver.overlapped(plan.layout))
    vision = sum(stage.vision for stage in plan.stages)
    layers = sum(stage.vision + stage.language for stage in plan.stages)
    if solver.unprofiled(plan.layout):
        return None
    if plan.layout.world_size != workload.hardware.devices or not solver.keeps_batch(plan.packing, plan.layout):
        return None
    is_same = (vision, layers) == (model.vision_layers, model.vision_layers + model.language_layers)
    if is_same and solver.admits(plan):
        return plan
    # Only the split is kept: what is recomputed follows from this machine's memory.
    boundaries = tuple(round(end * solver.layers / layers) for end in plan.boundaries)
    # Rounding may leave a stage without a layer, where the model is much smaller than the other one.
    if any(start >= end for start, end in pairwise((0, *boundaries))):
        return None
    return solver.fit(plan.packing, plan.layout, boundaries)
