"""Averages of gradients during the last backward pass, which follow from the profile: no name has them."""

from typing_extensions import override

from autotune.dimensions.dimension import Dimension
from trials.plan import Layout


class OverlapDimension(Dimension):
    """Whether gradients are averaged in buckets while a backward pass runs."""

    @override
    def text(self, layout: Layout, times: str) -> str:
        return ", averages during the last backward pass" if layout.bucket_bytes else ""
