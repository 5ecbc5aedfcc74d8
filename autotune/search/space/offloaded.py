"""Layouts whose layers offload what they keep, in place of recomputing it: where they may help."""

from dataclasses import astuple, replace
from functools import partial

from autotune.search.solver.solver import Solver
from autotune.search.space.layouts import OFFLOADS, layouts
from autotune.search.space.offers import FurtherLayouts
from trials.plan import TOWERS, Layout, Packing
from trials.workload import Workload


def further_offloaded(workload: Workload, solver: Solver) -> FurtherLayouts:
    """Return the layouts of all devices with each kind of layers that can offload, where the profile timed copies.

    They help where plans recompute layers, and copies take less time than that.
    """
    possible = (
        replace(solver.overlapped(layout), offload=offload)
        for layout in layouts(workload.model, workload.hardware.devices)
        for offload in OFFLOADS.values()
    )
    return FurtherLayouts(
        possible=tuple(layout for layout in possible if solver.untimed(layout) is None),
        helps=partial(_offloads, solver),
        searched="Layouts whose layers offload what they keep are",
        usual="recomputation alone",
        usual_alone="Recomputation is best, and no layers that offload are searched",
        cannot_help=(
            "layers could offload what they keep, but copies take longer than recomputation, plans fit the memory "
            "without, or the host lacks memory"
        ),
    )


def _offloads(solver: Solver, packing: Packing, layout: Layout) -> bool:
    """Return whether layers of the best plan offload, and the host has the memory for it.

    They do so of each kind that recomputes in more time, so that one of the three layouts is solved.
    """
    usual = replace(layout, offload="none")
    if not solver.keeps_batch(packing, layout):
        return False
    every = replace(layout, offload="both")
    offloading, recomputing = (solver.freeing_seconds(packing, each) for each in (every, usual))
    if any(layout.offloads(tower) != (offloading[tower] < recomputing[tower]) for tower in TOWERS):
        return False
    # Most of these were solved before.
    without = solver.solve(packing, usual)
    if without is not None and not any(any(astuple(each)) for stage in without.stages for each in stage.recomputed):
        return False
    plan = solver.solve(packing, layout)
    return plan is not None and solver.admits(plan)
