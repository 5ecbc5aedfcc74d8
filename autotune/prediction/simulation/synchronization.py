"""Passes that data ranks begin together, because they share the pack and exchange parts of it."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from trials.arrays import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Synchronization:
    """Passes of some steps that data ranks begin together.

    All ranks of a stage run the same passes in the same order. Those that share a pack have the same work in its pass,
    so it does not matter that they exchange in the middle of it: they end when the last of them has begun and done it.
    """

    degrees: Ints
    """Number of ranks that share the packs of each row, [steps, micro-batches]."""
    ranks: int
    """Data ranks: there are as many times of each step, one after the other."""
    forward: Bools
    """Stages on which ranks exchange in a forward pass, [stages]."""
    backward: Bools

    def of_steps(self, steps: slice) -> "Synchronization":
        """Return that of some of the steps."""
        return replace(self, degrees=self.degrees[steps])

    def await_others(self, clock: Floats, stage: int, micro_batch: int, *, backward: bool) -> None:
        """Advance the times at which the ranks of a stage begin a pass, [n], to that of the last one that shares it."""
        if not (self.backward if backward else self.forward)[stage]:
            return
        of_step = self.degrees[:, micro_batch]
        for degree in self._several:
            times, chosen = clock.reshape(len(of_step), -1, degree), of_step == degree
            times[chosen] = times[chosen].max(axis=2, keepdims=True)

    @property
    def _several(self) -> Iterator[int]:
        return (degree for degree in np.unique(self.degrees).tolist() if degree > 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sharing:
    """Packs of several degrees on the stages of a plan."""

    degrees: Ints
    """Number of ranks that share each pack, [packs]."""
    forward: Bools
    """As in `Synchronization`."""
    backward: Bools

    def synchronization(self, packs: Ints) -> Synchronization:
        """Return that of steps, [steps, micro-batches, data ranks]; the packs of a row have one degree."""
        of_rows = self.degrees[packs[:, :, 0]]
        return Synchronization(degrees=of_rows, ranks=packs.shape[2], forward=self.forward, backward=self.backward)
