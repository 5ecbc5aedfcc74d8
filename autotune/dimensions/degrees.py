"""The pipeline's stages, and the data ranks of each."""

import math
from collections.abc import Sequence

from typing_extensions import override

from autotune.dimensions.averages import average_seconds
from autotune.dimensions.dimension import Dimension
from trials.costs.exchange import Exchange
from trials.costs.layer_costs import LayerCosts
from trials.errors import InvalidPlan
from trials.plan import Layout
from trials.workload import Workload


class PipelineDimension(Dimension):
    """Stages of the pipeline."""

    pattern = r"p(?P<pipeline>\d{1,9})"

    @override
    def code(self, layout: Layout) -> str:
        return f"p{layout.pipeline}"

    @override
    def text(self, layout: Layout, times: str) -> str:
        return f"pipeline {layout.pipeline}"

    @override
    def coordinates(self, layout: Layout) -> tuple[float, ...]:
        return (math.log2(layout.pipeline),)

    @override
    def check_devices(self, layout: Layout, workload: Workload) -> None:
        layers = workload.model.vision_layers + workload.model.language_layers
        if layers < layout.pipeline:
            raise InvalidPlan(f"{layout.pipeline} stages need a layer each but the model has {layers}")


class DataDimension(Dimension):
    """Data ranks; their number follows from the devices and the other degrees, so that it has no coordinate."""

    pattern = r"-d(?P<data>\d{1,9})"

    @override
    def code(self, layout: Layout) -> str:
        return f"-d{layout.data}"

    @override
    def text(self, layout: Layout, times: str) -> str:
        return f" {times} data {layout.data}"

    @override
    def exchanges(
        self, costs: LayerCosts, layout: Layout, sequence: int, others: Sequence[Exchange]
    ) -> Sequence[Exchange]:
        """Return also averages of gradients over the data ranks."""
        if layout.data == 1:
            return others
        return *others, Exchange.of_bytes("average", layout.data, 0.0, average_seconds(costs, layout))
