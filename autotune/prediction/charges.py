"""What exchanges add to the passes of packs, less what these hide, and to what follows them in a step."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autotune.dimensions.zero import trained_parameters
from autotune.prediction.columns import WITHOUT_TARGETS
from autotune.prediction.parts import HEAD, LANGUAGE, Parts
from trials.arrays import Bools, Floats
from trials.costs.coefficients import KINDS
from trials.costs.exchange import Exchange
from trials.costs.layer_costs import LayerCosts
from trials.engine.static_memory import GRADIENT_BYTES
from trials.plan import Layout
from trials.stage import TOWERS


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PassesOfLayers:
    """Seconds of one layer of each kind, [packs, kinds] each."""

    forward: Floats
    backward: Floats
    """Without recomputation."""
    again: Floats
    """What recomputation adds."""


class ShardExchanges:
    """What passes hide, and leave out, of exchanges of weights and gradients in shards, by layer (ZeRO 2 and 3)."""

    def __init__(self, costs: LayerCosts, layout: Layout) -> None:
        gathers = (costs.exchange("gather", layout.data, kind) for kind in KINDS)
        seconds = [each.forward_seconds[-1] if each and layout.shards_weights else 0.0 for each in gathers]
        scatter = costs.exchange("scatter", layout.data)
        self.share = 1.0 - scatter.added_share if scatter and layout.shards_gradients else 0.0
        """Share of the shorter of both that an exchange and a computation save by running at once; negative where they
        slow each other down."""
        self._gathers = np.array(seconds)
        self._gathers_back = self._gathers * [costs[kind].has_backward for kind in KINDS]
        per_byte = scatter.seconds_per_byte[1] if scatter else 0.0
        self._scatters = per_byte * GRADIENT_BYTES * np.array(trained_parameters(costs))

    def left_out(self, parts: Parts) -> Floats:
        """Return the seconds of gathers that backward passes leave out, since the weights are still there, [stages].

        These are the weights of layers that are gathered once, and always those of the layer before the head.
        """
        once = parts.gathered_once.copy()
        once[:, LANGUAGE] = np.maximum(once[:, LANGUAGE], parts.layers[:, [LANGUAGE, HEAD]].min(axis=1) > 0)
        seconds: Floats = once @ self._gathers_back
        return seconds

    def hidden_forward(self, parts: Parts, passes: PassesOfLayers) -> Floats:
        """Return the seconds that forward passes hide, [packs, stages]: each layer those of the next one's weights."""
        several = np.maximum(parts.layers - 1, 0)
        follows = (parts.layers > 0) & (_before(parts.layers) > 0)
        of_same_kind = np.minimum(self._gathers, passes.forward) @ several.T
        hidden: Floats = self.share * (of_same_kind + np.minimum(self._gathers, _before(passes.forward)) @ follows.T)
        return hidden

    def hidden_backward(self, parts: Parts, passes: PassesOfLayers) -> Floats:
        """Return the seconds that backward passes hide, [packs, stages].

        Each layer hides gathering the weights of the one before it, unless they are still there, and scattering the
        gradients of the one behind it. The weights of the layer before the head are still there.
        """
        recomputed = parts.recomputed / np.maximum(parts.layers, 1)
        seconds = passes.backward[:, None, :] + passes.again[:, None, :] * recomputed
        gather, scatter = self._gathers_back, self._scatters
        gather_before = _before(gather) * (_before(parts.gathered_once) == 0)
        gather_before[:, HEAD] = 0.0
        scatter_behind = np.append(scatter[1:], 0.0)
        one, two = parts.layers == 1, parts.layers > 1
        # Of the layers between the first and the last of a kind.
        between = np.maximum(parts.layers - 2, 0)
        staying = np.clip(parts.gathered_once - 2, 0, between)
        gather_last = gather * (parts.gathered_once < 2)
        hidden = (
            one * np.minimum(gather_before + scatter_behind, seconds)
            + two * np.minimum(gather_before + scatter, seconds)
            + two * np.minimum(gather_last + scatter_behind, seconds)
            + (between - staying) * np.minimum(gather + scatter, seconds)
            + staying * np.minimum(scatter, seconds)
        )
        found: Floats = self.share * hidden.sum(axis=2)
        return found


def _before(of_kinds: Floats) -> Floats:
    """Return for each kind, along the last axis, the value of the kind before; 0 for the first."""
    found = np.zeros_like(of_kinds)
    found[..., 1:] = of_kinds[..., :-1]
    return found
