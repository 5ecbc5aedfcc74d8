"""Layouts whose data ranks average gradients on each node first, and then between nodes: where they may help."""

from dataclasses import replace
from functools import partial

from autotune.search.solver.solver import Solver
from autotune.search.space.layouts import layouts
from autotune.search.space.offers import FurtherLayouts
from trials.plan import Layout, Packing
from trials.workload import Workload


def further_by_nodes(workload: Workload, solver: Solver) -> FurtherLayouts:
    """Return the layouts of all devices with data groups over several nodes, and several ranks of a group on each.

    They send less between nodes and more on each of them. So they may help where their averages took less time in the
    profile than those of all ranks at once.
    """
    hardware = workload.hardware
    return FurtherLayouts(
        possible=tuple(
            by_nodes
            for layout in layouts(workload.model, hardware.devices)
            if (within := layout.grid.data_ranks_of_node(hardware.of_node)) > 1
            and solver.untimed(by_nodes := replace(layout, reduce_within=within)) is None
        ),
        helps=partial(_is_faster, solver),
        searched="Averages of gradients on each node first are",
        usual="averages over all ranks at once",
        usual_alone="Averages of gradients over all ranks at once are best and the only ones that are searched",
        cannot_help="averages on each node first took longer in the profile",
    )


def _is_faster(solver: Solver, packing: Packing, layout: Layout) -> bool:
    at_once = replace(layout, reduce_within=1)
    return solver.keeps_batch(packing, layout) and solver.reduction_seconds(layout) < solver.reduction_seconds(at_once)
