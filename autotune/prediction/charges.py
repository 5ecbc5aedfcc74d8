"""What exchanges add to the passes of packs, and to what follows them in a step."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autotune.prediction.columns import WITHOUT_TARGETS
from autotune.prediction.parts import Parts
from trials.arrays import Bools, Floats
from trials.costs.coefficients import KINDS
from trials.costs.exchange import Exchange
from trials.plan import TOWERS, Layout


@dataclass(frozen=True, kw_only=True, eq=False)
class Charges:
    """The exchanges of a layout together, for packs of one sequence degree. Those of layers are [kinds, 4]."""

    forward: Floats
    """Seconds as coefficients of the sizes of a rank's part of a pack, without targets."""
    backward: Floats
    """Seconds of the backward pass without recomputation; 0 for layers that have none."""
    again: Floats
    """Seconds that recomputation adds; 0 for layers that offload in its place."""
    in_pass: float
    """Seconds for each byte of gradients in each backward pass (ZeRO 2 and 3)."""
    in_step: float
    """Seconds for each byte of gradients once in a step."""
    replicas: float
    """Seconds for each byte of gradients of weights that tensor ranks hold whole, once in a step."""

    @classmethod
    def of(cls, exchanges: Iterable[Exchange], layout: Layout, has_backward: Bools) -> "Charges":
        """Add up exchanges; `has_backward` tells which kinds of layers have a backward pass, [kinds]."""
        passes = np.zeros((3, len(KINDS), 4))
        gradients = replicas = 0.0
        for each in exchanges:
            if each.layer is not None:
                seconds = each.forward_seconds, each.backward_seconds, each.recompute_seconds
                passes[:, KINDS.index(each.layer)] += seconds
            elif each.name == "replicas":
                replicas += each.seconds_per_byte[1]
            else:
                gradients += each.seconds_per_byte[1]
        passes[1:] *= has_backward[:, None]
        passes[2, [KINDS.index(tower) for tower in TOWERS if layout.offloads(tower)]] = 0
        forward, backward, again = passes
        in_pass, in_step = (gradients, 0.0) if layout.shards_gradients else (0.0, gradients)
        return cls(forward=forward, backward=backward, again=again, in_pass=in_pass, in_step=in_step, replicas=replicas)

    @property
    def are_in_passes(self) -> bool:
        """Whether they may add to a pass."""
        return bool(self.in_pass or self.forward.any() or self.backward.any())

    def seconds(self, parts: Parts, sizes: Floats, gradient_bytes: Floats) -> tuple[Floats, Floats]:
        """Return the seconds (forward, backward) of packs of `sizes` [packs, 5] on stages, [packs, stages] each.

        `gradient_bytes` [stages] are those of the trained parameters of each stage.
        """
        sizes = sizes[:, WITHOUT_TARGETS]
        forward, backward = (sizes @ (parts.layers @ side).T for side in (self.forward, self.backward))
        return forward, backward + sizes @ (parts.recomputed @ self.again).T + self.in_pass * gradient_bytes
