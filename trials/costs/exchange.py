"""The cost of what ranks exchange, as functions of a pack's size or for each byte."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from trials.costs.coefficients import NOTHING, Coefficients, LayerKind, Measured, MeasuredCost, times
from trials.costs.layer import LayerCost

ExchangeName: TypeAlias = Literal["sequence", "tensor", "gather", "scatter", "average", "replicas", "copy"]
"""Parts of packs, parts of layers, weights (ZeRO 3), gradients of which ranks keep a part, gradients, those of
weights that tensor ranks hold whole; copies of what layers keep to the host's memory and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange(MeasuredCost):
    """What ranks exchange, or copy, while all of them do: seconds that it adds to the passes of a layer.

    Coefficients are those of `LayerCost`, for the sizes of a rank's part of a pack. An exchange that is of no kind of
    layer takes its time for each byte of gradients, or of what layers keep: only the last coefficient is not 0.
    """

    name: ExchangeName
    ranks: int
    """Number of ranks that exchange with each other."""
    layer: LayerKind | None = None
    pipeline: int = 1
    """Stages of the layout in which it was timed."""
    within: int = 1
    """Neighbours among the ranks that average gradients before their groups do; 1 where all do at once."""
    forward_seconds: Coefficients = NOTHING
    backward_seconds: Coefficients = NOTHING
    """Seconds of the backward pass without recomputation."""
    recompute_seconds: Coefficients = NOTHING
    """Seconds that recomputation of the layer adds."""
    added_share: Annotated[Measured, Field(le=2)] = 1.0
    """How much scatters and gathers add to the passes that they overlap with, as a share of the shorter of the two:
    (time of both at once - longer) / shorter. 0 where the shorter one is hidden, 1 where nothing is saved, more where
    they slow each other down."""
    kept_bytes: Coefficients | None = None
    """Bytes of the layer in place of those of `LayerCost`, as are the next two: ranks do not divide all of them."""
    shared_bytes: Coefficients | None = None
    transient_bytes: Coefficients | None = None

    @classmethod
    def of_bytes(
        cls, name: ExchangeName, ranks: int, forward: float, backward: float, *, pipeline: int = 1, within: int = 1
    ) -> "Exchange":
        """Return an exchange of no layer, with its seconds per byte in each pass."""
        return cls(
            name=name,
            ranks=ranks,
            pipeline=pipeline,
            within=within,
            forward_seconds=(0.0, 0.0, 0.0, forward),
            backward_seconds=(0.0, 0.0, 0.0, backward),
        )

    @property
    def seconds_per_byte(self) -> tuple[float, float]:
        """Seconds (forward, backward) for each byte, of an exchange of no layer."""
        return self.forward_seconds[-1], self.backward_seconds[-1]

    def held(self, layer: LayerCost) -> LayerCost:
        """Return the layer with the bytes that it has where ranks exchange."""
        return replace(
            layer,
            kept_bytes=self.kept_bytes or layer.kept_bytes,
            shared_bytes=self.shared_bytes or layer.shared_bytes,
            transient_bytes=self.transient_bytes or layer.transient_bytes,
        )

    def times(self, factor: float) -> "Exchange":
        """Return the exchange where it takes `factor` times as long."""
        return replace(
            self,
            forward_seconds=times(self.forward_seconds, factor),
            backward_seconds=times(self.backward_seconds, factor),
            recompute_seconds=times(self.recompute_seconds, factor),
        )
