"""Layouts whose data ranks hold gradients, and with ZeRO 3 weights too, in shares: where they may help."""

from functools import partial

from autotune.search.solver.solver import Solver
from autotune.search.space.layouts import sharded_layouts
from autotune.search.space.offers import FurtherLayouts
from trials.plan import Layout, Packing, ZeroStage
from trials.workload import Workload

_BEFORE: dict[ZeroStage, ZeroStage] = {2: 1, 3: 2}


def further_sharded(workload: Workload, solver: Solver) -> FurtherLayouts:
    """Return the layouts with ZeRO 2 and 3 of all devices that the profile can predict.

    They save memory and exchange more. So they may help where it lacks: with packs for which the ZeRO stage before
    recomputes more, or does not fit.
    """
    layouts = sharded_layouts(workload.hardware.devices)
    return FurtherLayouts(
        possible=tuple(layout for layout in layouts if solver.untimed(layout) is None),
        helps=partial(_saves_recomputation, solver),
        searched="ZeRO 2 and 3 are",
        usual="ZeRO 0 or 1",
        usual_alone="ZeRO 0 and 1 are best and the only stages that are searched",
        cannot_help="2 and 3 save memory, but pipeline 1 fits with ZeRO 1 and with as few recomputed layers",
    )


def _saves_recomputation(solver: Solver, packing: Packing, layout: Layout) -> bool:
    if not solver.keeps_batch(packing, layout):
        return False
    before = Layout(pipeline=1, data=layout.data, zero=_BEFORE[layout.zero])
    plan, other = solver.solve(packing, layout), solver.solve(packing, before)
    return plan is not None and (other is None or other.stages != plan.stages)
