"""Weight gradients that stages of a pipeline defer to where they would wait."""

from dataclasses import replace
from functools import partial

from typing_extensions import override

from autotune.dimensions.dimension import Dimension, FurtherLayouts, PlanSolver
from autotune.dimensions.usual import layouts
from trials.costs.layer_costs import LayerCosts
from trials.plan import Layout, Packing
from trials.workload import Workload


class ZeroBubbleDimension(Dimension):
    """The pipeline's schedule: 1F1B, or ZB-H1 (Qi et al. 2023)."""

    pattern = r"(?:-(?P<zero_bubble>zb))?"

    @override
    def code(self, layout: Layout) -> str:
        return "-zb" if layout.zero_bubble else ""

    @override
    def value(self, code: str) -> bool:
        return True

    @override
    def text(self, layout: Layout, times: str) -> str:
        return ", zero bubble" if layout.zero_bubble else ""

    @override
    def coordinates(self, layout: Layout) -> tuple[float, ...]:
        return (0.5 * layout.zero_bubble,)

    @override
    def unprofiled(self, costs: LayerCosts, layout: Layout, *, exactly: bool) -> str | None:
        has_times = any(any(cost.weight_seconds) for _, cost in costs.layers)
        return "weight gradients of layers apart" if layout.zero_bubble and not has_times else None

    @override
    def further(self, workload: Workload, solver: PlanSolver) -> FurtherLayouts | None:
        """Return every pipeline with deferred weight gradients, where the profile timed these.

        They help where stages wait for each other, and the first stage does not fill the memory alone.
        """
        pipelines = (each for each in layouts(workload.model, workload.hardware.devices) if each.pipeline > 1)
        deferring = (replace(each, zero_bubble=True) for each in pipelines)
        possible = tuple(each for each in deferring if solver.unprofiled(each) is None)
        if not possible:
            return None
        return FurtherLayouts(
            possible=possible,
            helps=partial(_is_faster, solver),
            searched="Zero-bubble schedules are",
            usual="1F1B",
            usual_alone="1F1B is best and the only schedule of pipelines that is searched",
            cannot_help="deferred weight gradients shorten no step, or do not fit the memory",
        )


def _is_faster(solver: PlanSolver, packing: Packing, layout: Layout) -> bool:
    if not solver.keeps_batch(packing, layout):
        return False
    plan, usual = solver.solve(packing, layout), solver.solve(packing, replace(layout, zero_bubble=False))
    if plan is None:
        return False
    if usual is None:
        return True
    seconds, of_usual = (solver.epoch_seconds((each,))[0] for each in (plan, usual))
    return seconds < of_usual
