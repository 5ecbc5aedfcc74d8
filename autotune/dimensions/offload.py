"""Layers that offload what they keep to the host's memory, in place of recomputing it."""

from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import override

from autotune.dimensions.dimension import Dimension, FurtherLayouts, PlanSolver
from autotune.dimensions.usual import layouts
from trials.costs.layer_costs import LayerCosts
from trials.errors import InvalidPlan
from trials.plan import Layout, Offload, Packing
from trials.stage import TOWERS
from trials.workload import Hardware, Workload

if TYPE_CHECKING:
    from trials.job import Job

_KINDS: dict[str, Offload] = {"ov": "vision", "ol": "language", "ovl": "both"}
"""Kinds of layers that offload, by the end of a layout's name."""
_TEXTS: dict[Offload, str] = {
    "none": "",
    "vision": ", vision layers offload",
    "language": ", language layers offload",
    "both": ", layers offload",
}


class OffloadDimension(Dimension):
    """Kinds of layers that offload."""

    pattern = rf"(?:-(?P<offload>{'|'.join(_KINDS)}))?"

    @override
    def code(self, layout: Layout) -> str:
        return "".join(f"-{code}" for code, kinds in _KINDS.items() if kinds == layout.offload)

    @override
    def value(self, code: str) -> Offload:
        return _KINDS[code]

    @override
    def text(self, layout: Layout, times: str) -> str:
        return _TEXTS[layout.offload]

    @override
    def coordinates(self, layout: Layout) -> tuple[float, ...]:
        return tuple(0.5 * layout.offloads(tower) for tower in TOWERS)

    @override
    def check(self, layout: Layout, job: "Job", hardware: Hardware) -> None:
        if layout.offload != "none" and hardware.accelerator == "cpu":
            raise InvalidPlan(
                "its layers offload what they keep to the host's memory, where a CPU has it already; use offload none"
            )

    @override
    def unprofiled(self, costs: LayerCosts, layout: Layout, *, exactly: bool) -> str | None:
        if layout.offload == "none" or (costs.exchange("copy") is not None and costs.compile_seconds is None):
            return None
        return "copies of what layers keep to the host's memory and back"

    @override
    def further(self, workload: Workload, solver: PlanSolver) -> FurtherLayouts:
        """Return those with each kind of layers that can offload, where the profile timed copies.

        They help where plans recompute layers, and copies take less time than that.
        """
        possible = (
            replace(solver.overlapped(layout), offload=offload)
            for layout in layouts(workload.model, workload.hardware.devices)
            for offload in _KINDS.values()
        )
        return FurtherLayouts(
            possible=tuple(layout for layout in possible if solver.unprofiled(layout) is None),
            helps=partial(_offloads, solver),
            searched="Layouts whose layers offload what they keep are",
            usual="recomputation alone",
            usual_alone="Recomputation is best, and no layers that offload are searched",
            cannot_help=(
                "layers could offload what they keep, but copies take longer than recomputation, plans fit the memory "
                "without, or the host lacks memory"
            ),
        )


def _offloads(solver: PlanSolver, packing: Packing, layout: Layout) -> bool:
    """Return whether layers of the best plan offload, and the host has the memory for it.

    A kind of layer offloads where its recomputation takes more time, so only one of the three layouts is solved.
    """
    usual = replace(layout, offload="none")
    if not solver.keeps_batch(packing, layout):
        return False
    every = replace(layout, offload="both")
    offloading, recomputing = (solver.recompute_seconds(packing, each) for each in (every, usual))
    if any(layout.offloads(tower) != (offloading[tower] < recomputing[tower]) for tower in TOWERS):
        return False
    # The solver caches its solutions, and usual layouts were mostly solved before, so this call costs little.
    without = solver.solve(packing, usual)
    if without is not None and not any(any(astuple(each)) for stage in without.stages for each in stage.recomputed):
        return False
    plan = solver.solve(packing, layout)
    return plan is not None and solver.admits(plan)
