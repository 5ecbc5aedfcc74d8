"""Layouts whose layers offload what they keep, in place of recomputing it: where they may help."""

from dataclasses import replace
from functools import partial

from autotune.search.solver.solver import Solver
from autotune.search.space.layouts import OFFLOADS, layouts
from autotune.search.space.offers import FurtherLayouts
from trials.plan import Layout, Packing
from trials.workload import Workload


def further_offloaded(workload: Workload, solver: Solver) -> FurtherLayouts:
    """Return the layouts of all devices with each kind of layers that can offload, where the profile timed copies.

    They help where plans recompute layers, and copies take less time than that.
    """
    possible = (
        replace(layout, offload=offload)
        for layout in layouts(workload.model, workload.hardware.devices)
        for offload in OFFLOADS.values()
    )
    return FurtherLayouts(
        possible=tuple(layout for layout in possible if solver.untimed(layout) is None),
        helps=partial(_offloads, solver),
        searched="Layouts whose layers offload what they keep are",
        usual="recomputation alone",
        usual_alone="Recomputation is best, and no layers that offload are searched",
        cannot_help="layers could offload what they keep, but plans fit the memory without, or the host lacks memory",
    )


def _offloads(solver: Solver, packing: Packing, layout: Layout) -> bool:
    """Return whether layers of the best plan offload, and the host has the memory for it."""
    if not solver.keeps_batch(packing, layout):
        return False
    plan = solver.solve(packing, layout)
    return plan is not None and solver.admits(plan)
