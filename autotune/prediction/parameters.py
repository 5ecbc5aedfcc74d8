"""Numbers of parameters of pipeline stages, which decide their static bytes, averages of gradients and updates."""

import numpy as np

from autotune.prediction.parts import HEAD, PROJECTOR, Parts
from trials.arrays import Floats
from trials.costs.coefficients import KINDS
from trials.costs.layer_costs import LayerCosts


class Parameters:
    """Numbers of parameters that each of several ranks holds of a copy of a stage, [stages]."""

    def __init__(self, costs: LayerCosts) -> None:
        layers = [costs[kind] for kind in KINDS]
        self._every = np.array([layer.parameters for layer in layers])
        self._frozen = np.array([layer.frozen_parameters for layer in layers])
        self._dealt = np.array([layer.tensor_parallel_parameters for layer in layers])
        self._tied = costs["head"].tied_parameters

    def held(self, parts: Parts, tensor: int = 1) -> Floats:
        """Return the parameters that each of `tensor` ranks holds."""
        return self._of_stages(parts, self._every, 1 - 1 / tensor)

    def frozen(self, parts: Parts, tensor: int = 1) -> Floats:
        """Return the parameters of `held` that do not train."""
        return self._of_stages(parts, self._frozen, 1 - 1 / tensor)

    def trained(self, parts: Parts, tensor: int = 1) -> Floats:
        """Return the parameters of `held` that train."""
        return self._of_stages(parts, self._every - self._frozen, 1 - 1 / tensor)

    def replicated(self, parts: Parts) -> Floats:
        """Return the trained parameters that each tensor rank holds whole."""
        return self._of_stages(parts, self._every - self._frozen, 1.0)

    def copied(self, parts: Parts) -> Floats:
        """Return the trained parameters of which another stage of the pipeline has a copy: a tied weight's."""
        apart = (parts.layers[:, [PROJECTOR, HEAD]] > 0).sum(axis=1) == 1
        trains = self._every[HEAD] > self._frozen[HEAD]
        copied: Floats = apart * trains * float(self._tied)
        return copied

    def _of_stages(self, parts: Parts, of_kinds: Floats, elsewhere: float) -> Floats:
        """Return the sums of what is counted in layers of each kind, without a share of what tensor ranks divide."""
        # A layer that is cut is frozen as a whole, or not at all, and so are the ends of the language model.
        counted = of_kinds > 0
        is_once = parts.layers[:, [PROJECTOR, HEAD]].all(axis=1)
        counts: Floats = parts.layers @ (of_kinds - self._dealt * elsewhere * counted)
        counts -= is_once * counted[HEAD] * self._tied
        return counts
