"""Averages of gradients on each node first, and then between nodes."""

from dataclasses import replace
from functools import partial

from typing_extensions import override

from autotune.dimensions.averages import knows_average
from autotune.dimensions.dimension import Dimension, FurtherLayouts, PlanSolver
from autotune.dimensions.usual import layouts
from trials.costs.layer_costs import LayerCosts
from trials.errors import InvalidPlan
from trials.plan import Layout, Packing
from trials.workload import Workload


class NodeReductionDimension(Dimension):
    """Data ranks of a node that average gradients first."""

    pattern = r"(?:-w(?P<reduce_within>\d{1,9}))?"

    @override
    def code(self, layout: Layout) -> str:
        return f"-w{layout.reduce_within}" if layout.reduce_within > 1 else ""

    @override
    def text(self, layout: Layout, times: str) -> str:
        return f", averages over {layout.reduce_within} ranks of a node first" if layout.reduce_within > 1 else ""

    @override
    def coordinates(self, layout: Layout) -> tuple[float, ...]:
        return (0.5 * (layout.reduce_within > 1),)

    @override
    def check_devices(self, layout: Layout, workload: Workload) -> None:
        within, groups = layout.reduce_within, layout.grid.data_ranks_of_node(workload.hardware.of_node)
        if within > 1 and groups == 1:
            raise InvalidPlan(f"no stage has several data ranks on each of several nodes; leave -w{within} out")
        if within not in (1, groups):
            raise InvalidPlan(f"{groups} data ranks of a stage are neighbours on a node, not {within}; use -w{groups}")

    @override
    def unprofiled(self, costs: LayerCosts, layout: Layout, *, exactly: bool) -> str | None:
        if knows_average(costs, layout):
            return None
        return f"averages of gradients over {layout.reduce_within} data ranks of a node first"

    @override
    def further(self, workload: Workload, solver: PlanSolver) -> FurtherLayouts:
        """Return those with data groups over several nodes, and several ranks of a group on each.

        They send less between nodes and more on each of them. So they may help where their averages took less time in
        the profile than those of all ranks at once.
        """
        hardware = workload.hardware
        return FurtherLayouts(
            possible=tuple(
                by_nodes
                for layout in layouts(workload.model, hardware.devices)
                if (within := layout.grid.data_ranks_of_node(hardware.of_node)) > 1
                and solver.unprofiled(by_nodes := replace(layout, reduce_within=within)) is None
            ),
            helps=partial(_is_faster, solver),
            searched="Averages of gradients on each node first are",
            usual="averages over all ranks at once",
            usual_alone="Averages of gradients over all ranks at once are best and the only ones that are searched",
            cannot_help="averages on each node first took longer in the profile",
        )


def _is_faster(solver: PlanSolver, packing: Packing, layout: Layout) -> bool:
    at_once = replace(layout, reduce_within=1)
    return solver.keeps_batch(packing, layout) and solver.reduction_seconds(layout) < solver.reduction_seconds(at_once)
