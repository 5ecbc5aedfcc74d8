"""The ZeRO stage: what data ranks hold in shards."""

from collections.abc import Sequence
from functools import partial

from typing_extensions import override

from autotune.dimensions.dimension import Dimension, FurtherLayouts, PlanSolver
from autotune.dimensions.usual import SHARDING, sharded_layouts
from trials.costs.coefficients import KINDS
from trials.costs.exchange import Exchange
from trials.costs.layer_costs import LayerCosts
from trials.errors import InvalidPlan
from trials.plan import Layout, Packing, ZeroStage
from trials.stage import TOWERS
from trials.workload import Workload

# ZeRO stages by what they exchange: 2 is compared with 1, and 3 with 2, each of which is cheaper where it fits.
_BEFORE: dict[ZeroStage, ZeroStage] = {2: 1, 3: 2}


class ZeroDimension(Dimension):
    """Optimizer states (1), gradients (2) and weights (3) in shards (Rajbhandari et al. 2020)."""

    pattern = r"-z(?P<zero>[0-3])"

    @override
    def code(self, layout: Layout) -> str:
        return f"-z{layout.zero}"

    @override
    def text(self, layout: Layout, times: str) -> str:
        return f", ZeRO {layout.zero}"

    @override
    def coordinates(self, layout: Layout) -> tuple[float, ...]:
        return (0.5 * layout.zero,)

    @override
    def check_devices(self, layout: Layout, workload: Workload) -> None:
        if workload.model.dtype == "bfloat16" and layout.zero == 0:
            raise InvalidPlan("bfloat16 weights need ZeRO 1, which keeps a float32 copy of them")
        if layout.zero in SHARDING and layout.data == 1:
            raise InvalidPlan(
                f"ZeRO {layout.zero} shares gradients among data ranks, and there is only one; use ZeRO 1"
            )

    @override
    def unprofiled(self, costs: LayerCosts, layout: Layout, *, exactly: bool) -> str | None:
        is_timed = costs.exchange("scatter") is not None
        if layout.zero < 2 or (is_timed and (layout.zero == 2 or costs.compile_seconds is None)):
            return None
        return f"what ranks exchange that hold gradients or weights in shards (ZeRO {layout.zero})"

    @override
    def exchanges(
        self, costs: LayerCosts, layout: Layout, sequence: int, others: Sequence[Exchange]
    ) -> Sequence[Exchange]:
        """Return what ZeRO 2 and 3 scatter in place of averages, and what ZeRO 3 gathers."""
        if not layout.shards_gradients:
            return others
        gathers = (costs.exchange("gather", layout.data, kind) for kind in KINDS if layout.shards_weights)
        own = (each for each in (*gathers, costs.exchange("scatter", layout.data)) if each is not None)
        return *(each for each in others if each.name != "average"), *own

    @override
    def further(self, workload: Workload, solver: PlanSolver) -> FurtherLayouts:
        """Return ZeRO 2 and 3 where the profile can predict them.

        They save memory and exchange more. So they may help where it lacks: with packs for which the ZeRO stage before
        recomputes more, or does not fit.
        """
        possible = sharded_layouts(workload.hardware.devices)
        return FurtherLayouts(
            possible=tuple(layout for layout in possible if solver.unprofiled(layout) is None),
            helps=partial(_saves_recomputation, solver),
            searched="ZeRO 2 and 3 are",
            usual="ZeRO 0 or 1",
            usual_alone="ZeRO 0 and 1 are best and the only stages that are searched",
            cannot_help="2 and 3 save memory, but pipeline 1 fits with ZeRO 1 and with as few recomputed layers",
        )


def whole_weights(costs: LayerCosts, layout: Layout) -> list[int]:
    """Return how many weights ZeRO 3 holds whole in any case in the backward pass of a layer of each kind.

    These are the weights of the layer and of a neighbour: of the next layer of its kind or, where the kind has one
    layer, of the larger neighbour.
    """
    counts = gathered_weights(costs, layout)
    larger = [max(before, after) for before, after in zip([0, *counts], [*counts[1:], 0], strict=False)]
    return [
        count + (count if kind in TOWERS else other) for kind, count, other in zip(KINDS, counts, larger, strict=True)
    ]


def gathered_weights(costs: LayerCosts, layout: Layout) -> list[int]:
    """Return how many weights ZeRO 3 gathers for the backward pass of a layer of each kind, in the order of KINDS."""
    return [costs[kind].parameters if layout.shards_weights and costs[kind].has_backward else 0 for kind in KINDS]


def whole_gradients(costs: LayerCosts, layout: Layout) -> list[int]:
    """Return how many gradients ZeRO 2 and 3 hold whole in the backward pass of a layer of each kind.

    These are the gradients of the layer, and of the one behind it, which ranks still exchange: of a tower the larger
    one of a further layer and of what is behind the last. Gradients of a tied weight stay from the head to the word
    embedding.
    """
    if not layout.shards_gradients:
        return [0] * len(KINDS)
    counts = trained_parameters(costs)
    head = costs["head"]
    tied = head.parameters - head.frozen_parameters - counts[-1]
    whole = [
        count + max(behind, count if kind in TOWERS else 0)
        for kind, count, behind in zip(KINDS, counts, [*counts[1:], 0], strict=True)
    ]
    return [*whole[:-2], *(count + tied for count in whole[-2:])]


def trained_parameters(costs: LayerCosts) -> list[int]:
    """Return how many parameters of each kind of layer train; a tied weight counts in the projector alone."""
    counts = [costs[kind].parameters - costs[kind].frozen_parameters for kind in KINDS]
    return [*counts[:-1], max(0, counts[-1] - costs["head"].tied_parameters)]


def _saves_recomputation(solver: PlanSolver, packing: Packing, layout: Layout) -> bool:
    if not solver.keeps_batch(packing, layout):
        return False
    before = Layout(pipeline=1, data=layout.data, zero=_BEFORE[layout.zero])
    plan, other = solver.solve(packing, layout), solver.solve(packing, before)
    recomputed = [each and [stage.recomputed for stage in each.stages] for each in (plan, other)]
    return plan is not None and recomputed[0] != recomputed[1]
