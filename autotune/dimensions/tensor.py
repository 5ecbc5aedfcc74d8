"""The tensor degree: ranks that hold the matrices of the language layers together (Megatron-LM)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from typing_extensions import override

from autotune.dimensions.averages import average_seconds
from autotune.dimensions.dimension import Dimension, FurtherLayouts, PlanSolver
from autotune.dimensions.usual import layouts
from trials.costs.exchange import Exchange
from trials.costs.layer_costs import LayerCosts
from trials.errors import InvalidPlan
from trials.plan import Layout
from trials.workload import Hardware, Workload

if TYPE_CHECKING:
    from trials.job import Job


def tensor_degrees(costs: LayerCosts) -> tuple[int, ...]:
    """Return the tensor degrees above 1 that were timed, so that plans with them can be compared."""
    if not costs.timed_degrees("sequence"):
        return ()
    return tuple(degree for degree in costs.timed_degrees("tensor") if _knows(costs, degree))


def _knows(costs: LayerCosts, degree: int) -> bool:
    """Return whether layers that `degree` ranks hold together can be predicted."""
    is_dealt = costs["language"].tensor_parallel_parameters > 0 and costs.compile_seconds is None
    timed = costs.is_of_one_rank or costs.exchange("tensor", degree, "language") is not None
    return degree == 1 or (is_dealt and timed)


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
    def unprofiled(self, costs: LayerCosts, layout: Layout, *, exactly: bool) -> str | None:
        degree = layout.tensor
        if degree in (1, *tensor_degrees(costs)) if exactly else _knows(costs, degree):
            return None
        return f"what {degree} ranks exchange that hold layers together"

    @override
    def exchanges(
        self, costs: LayerCosts, layout: Layout, sequence: int, others: Sequence[Exchange]
    ) -> Sequence[Exchange]:
        """Return also what ranks exchange around the blocks of a language layer, and gradients of what each has whole.

        Raise ValueError where other profiles would have timed the degree.
        """
        degree = layout.tensor
        if degree == 1:
            return others
        around = costs.exchange("tensor", degree, "language")
        if around is None and not _knows(costs, degree):
            raise ValueError(f"the profile has no times of what {degree} ranks exchange that hold layers together")
        # The sum over tensor ranks takes the time of an average over as many data ranks.
        alike = replace(layout, data=degree, tensor=1, reduce_within=1)
        replicas = Exchange.of_bytes("replicas", degree, 0.0, average_seconds(costs, alike))
        return *others, *([around] if around else []), replicas

    @override
    def further(self, workload: Workload, solver: PlanSolver) -> FurtherLayouts:
        """Return layouts with each tensor degree that was timed, is a power of two and fits a node."""
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
