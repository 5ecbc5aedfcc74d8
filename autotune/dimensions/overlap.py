"""Averages of gradients during the last backward pass, which follow from the profile: no name has them."""

from dataclasses import replace

from typing_extensions import override

from autotune.dimensions.dimension import Dimension
from trials.costs.layer_costs import CommunicationCost, LayerCosts
from trials.plan import Layout

LEAST_HIDDEN_SHARE = 0.5
"""Averages of gradients run during a backward pass where this hides at least this share of them. Buckets cost time in
each pass: on two CPU ranks, which have no core left for messages, steps with them were 2 to 6 % longer."""


def overlapped(costs: LayerCosts, layout: Layout) -> Layout:
    """Return the layout with averages of gradients during the last backward pass, where that is known to help."""
    if not layout.can_overlap:
        return layout
    timed = _timed(costs, layout)
    helps = timed is not None and timed.hidden_share >= LEAST_HIDDEN_SHARE
    return replace(layout, bucket_bytes=timed.bucket_bytes if timed and helps else 0)


def hidden_share(costs: LayerCosts, layout: Layout) -> float:
    """Return the share of averages that a backward pass of the same length hides; 0 where they run after it."""
    timed = _timed(costs, layout) if layout.bucket_bytes else None
    return timed.hidden_share if timed else 0.0


def _timed(costs: LayerCosts, layout: Layout) -> CommunicationCost | None:
    return next((cost for cost in costs.communications if cost.data == layout.grid.of_stage), None)


class OverlapDimension(Dimension):
    """Whether gradients are averaged in buckets while a backward pass runs."""

    @override
    def text(self, layout: Layout, times: str) -> str:
        return ", averages during the last backward pass" if layout.bucket_bytes else ""
