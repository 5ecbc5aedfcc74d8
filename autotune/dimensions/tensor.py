"""The tensor degree: ranks that hold the matrices of the language layers together (Megatron-LM)."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from autotune.dimensions.dimension import Dimension, FurtherLayouts, PlanSolver
from autotune.dimensions.usual import layouts
from trials.errors import InvalidPlan
from trials.plan import Layout
from trials.workload import Hardware, Workload

if TYPE_CHECKING:
    from trials.job import Job
    from trials.layer_costs import LayerCosts


def timed_degrees(costs: "LayerCosts") -> tuple[int, ...]:
    """Return the tensor degrees above 1 that were timed, so that plans with them can be compared."""
    return tuple(cost.degree for cost in costs.tensor if costs.knows_tensor(cost.degree) and costs.sharing)


class TensorDimension(Dimension):
    """Ranks that hold a language layer."""

    pattern = r"(?:-t(?P<tensor>\d{1,9}))?"

    @override
    def code(self, layout: Layout) -> str:
        return f"-t{layout.tensor}" if layout.tensor > 1 else ""

    @override
    def text(self, layout: Layout, times: str) -> str:
        return f" {times} tensor {layout.tensor}" if layout.tensor > 1 else ""

    @override
    def coordinates(self, layout: Layout) -> tuple[float, ...]:
        return (math.log2(layout.tensor),)

    @override
    def check(self, layout: Layout, job: "Job", hardware: Hardware) -> None:
        if layout.tensor == 1:
            return
        if not hardware.has_groups(layout.tensor):
            raise InvalidPlan(
                f"it has tensor degree {layout.tensor}, but a node has {hardware.of_node} devices, and such "
                "ranks exchange too much to lie on several nodes; use a degree that divides them"
            )
        import torch  # noqa: PLC0415 - look-ups name layouts without it

        from trials.model.refusals.tensor import check_tensor  # noqa: PLC0415
        from trials.model.skeleton import build_skeleton, load_config  # noqa: PLC0415

        config = load_config(job.model.path, trust_remote_code=job.model.trust_remote_code)
        skeleton = build_skeleton(config, torch.float32)
        layers = skeleton.modules(skeleton.chain.language_layers)
        check_tensor(config, layers, layout.tensor, adapters=job.training.lora.rank is not None)

    @override
    def untimed(self, costs: "LayerCosts", layout: Layout, *, exactly: bool) -> str | None:
        degree = layout.tensor
        if degree in (1, *timed_degrees(costs)) if exactly else costs.knows_tensor(degree):
            return None
        return f"what {degree} ranks exchange that hold layers together"

    @override
    def further(self, workload: Workload, solver: PlanSolver) -> FurtherLayouts:
        """Return those with each degree that was timed, is a power of two and fits a node."""
        hardware = workload.hardware
        return FurtherLayouts(
            possible=tuple(
                replace(layout, tensor=degree)
                for degree in solver.tensor_degrees
                if degree & (degree - 1) == 0 and hardware.has_groups(degree)
                for layout in layouts(workload.model, hardware.devices // degree)
            ),
            searched="Tensor degrees are",
            usual="tensor degree 1",
            usual_alone="Tensor degree 1 is best and the only one that is searched",
        )
