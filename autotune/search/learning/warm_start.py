"""Where a search begins after searches on similar workloads: their calibration, and their winners."""

import logging
from dataclasses import replace
from itertools import pairwise

from autotune.prediction.calibration import CalibrationState
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


def inherited_plans(store: Store, workload: Workload, space: Space) -> list[Plan]:
    """Return the winners of the nearest workloads on this kind of devices, adapted to this model, nearest first."""
    found: list[Plan] = []
    name = workload.hardware.device_name
    for near in store.nearest_plans(fields_of(workload), hardware_name=name, limit=_LOOKED_AT):
        if near.best.workload.hardware.device_name != name:  # the store also finds an L40S by the name L4
            continue
        plan = moved(near.best.plan, workload, space)
        if plan is not None and space.holds(plan) and plan not in found:
            found.append(plan)
        if len(found) == _PLANS:
            break
    return found


def moved(plan: Plan, workload: Workload, space: Space) -> Plan | None:
    """Return the plan, or for a model with other layers one of the same packing and layout with a proportional split.

    None where neither can be trained, or the space has no points of this packing and layout.
    """
    solver = space.solver
    model, plan = workload.model, replace(plan, layout=solver.overlapped(plan.layout))
    # Other data, or a profile with other times, may not even allow the epoch of such packs to be built.
    if not space.has_points(plan.packing, plan.layout):
        return None
    vision = sum(stage.vision for stage in plan.stages)
    layers = sum(stage.vision + stage.language for stage in plan.stages)
    is_same = (vision, layers) == (model.vision_layers, model.vision_layers + model.language_layers)
    if is_same and solver.admits(plan):
        return plan
    # Only the split is kept: what is recomputed follows from this machine's memory.
    boundaries = tuple(round(end * solver.layers / layers) for end in plan.boundaries)
    # Rounding may leave a stage without a layer, where the model is much smaller than the other one.
    if any(start >= end for start, end in pairwise((0, *boundaries))):
        return None
    return solver.fit(plan.packing, plan.layout, boundaries)
