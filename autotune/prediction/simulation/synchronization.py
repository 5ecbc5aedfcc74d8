"""Data ranks that wait for each other inside of a step: before passes of packs that they share, or at each layer."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np

from autotune.prediction.simulation.zero_bubble import DeferredWeights
from trials.arrays import Bools, Floats, Ints

_Simulated = TypeVar("_Simulated")


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lockstep:
    """Data ranks of a plan's only stage that exchange weights or gradients at each layer (ZeRO 2 and 3).

    A rank begins a layer when all ranks have begun the layer before it, and a backward pass ends on all ranks at once
    (`Gathering` in trials/engine/gathering.py). So a rank with more vision and another with more language work wait for
    each other in the same pass.
    """

    layers: Floats
    """Layers of each kind, in the order of a forward pass, [kinds]."""
    forward: Floats
    """Share of each kind in the forward pass of a pack, [packs, kinds]."""
    backward: Floats
    waits_forward: Bools
    """Whether ranks exchange at layers of a kind in a forward pass, [kinds]."""
    waits_back: Bools

    def awaited(self, packs: Ints, forward: Floats, backward: Floats) -> tuple[Floats, Floats]:
        """Return the seconds of passes with the waiting inside of them; arguments and shapes as in `run_waiting`."""
        steps, count, ranks = packs.shape

        def of_rows(side: Floats) -> Floats:
            return side.reshape(steps, ranks, count).transpose(0, 2, 1)

        def of_ranks(side: Floats) -> Floats:
            return side.transpose(0, 2, 1).reshape(forward.shape)

        there, back = of_rows(forward)[..., None] * self.forward[packs], of_rows(backward)[..., None]
        turned = self._through(np.zeros(packs.shape), there, self.waits_forward, range(len(self.layers)))
        ended = self._through(turned, back * self.backward[packs], self.waits_back, reversed(range(len(self.layers))))
        return of_ranks(turned), of_ranks(ended.max(axis=2, keepdims=True) - turned)

    def _through(self, times: Floats, seconds: Floats, waits: Bools, kinds: Iterable[int]) -> Floats:
        """Return the times at which ranks end these kinds of layers, which they begin at `times`, [..., ranks].

        `seconds` are [..., ranks, kinds]. The layers of a kind take equal times, so of all ways to wait for others, the
        longest does so at the first layer or at the last one.
        """
        for kind in kinds:
            own, layers = seconds[..., kind], self.layers[kind]
            alone = times + own
            if not layers or not waits[kind]:
                times = alone
                continue
            each = own / layers
            first = times.max(axis=-1, keepdims=True)
            before_last = np.maximum(alone - each, first + own - 2 * each).max(axis=-1, keepdims=True)
            times = np.maximum(np.maximum(alone, first + own - each), before_last)
        return times


Waiting: TypeAlias = Sharing | Lockstep
"""Which data ranks wait for each other inside of a step, and when."""


def run_waiting(
    waiting: Waiting | None,
    simulated: Callable[..., _Simulated],
    packs: Ints,
    forward: Floats,
    backward: Floats,
    *links: Floats,
    weights: DeferredWeights | None = None,
) -> _Simulated:
    """Return what `simulate` or `trace` returns of steps where ranks wait for each other.

    `packs` are numbers of packs, [steps, micro-batches, data ranks]. Seconds are as in `simulate`, [steps x data ranks,
    micro-batches, stages]; `links` are its `sends` and `returns`.
    """
    if isinstance(waiting, Lockstep):  # of one stage, which sends nothing and defers no weight gradients
        return simulated(*waiting.awaited(packs, forward, backward))
    synchronization = None if waiting is None else waiting.synchronization(packs)
    return simulated(forward, backward, *links, synchronization=synchronization, weights=weights)
