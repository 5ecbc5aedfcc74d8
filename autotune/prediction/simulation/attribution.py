"""Attribution of the time of a step to parts that sum to the whole, each by one cause added to an ideal step.

The causes are added in this order, so that no part is negative: padding, recomputation, stages of unequal work, data
ranks of unequal work, the pipeline's order, packs of unequal work, loading of data, communication, the optimizer.
docs/methods.md defines each.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np

from autotune.prediction.simulation.schedule import simulate
from autotune.prediction.simulation.synchronization import Waiting, run_waiting
from autotune.prediction.simulation.zero_bubble import DeferredWeights
from trials.arrays import Bools, Floats, Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackSeconds:
    """Seconds of packs on the stages of a plan, [packs, stages] unless stated otherwise."""

    load: Floats
    """Waiting for the pack's data, before its forward pass."""
    forward: Floats
    backward: Floats
    """Recomputation included."""
    recompute: Floats
    """The part of `backward` that is recomputation."""
    weights: Floats
    """The part of `backward` that is deferred weight gradients; 0 with 1F1B."""
    most_deferred: Ints
    """Most packs whose weight gradients wait, [stages]."""
    samples: Floats
    """The samples alone, without padding and recomputation, if the ranks that share a pack divided it evenly."""
    equal_parts: Floats
    """The same with padding."""
    sends: Floats
    """Sending the states from each stage to the next, [packs, stages - 1]."""
    returns: Floats
    """Sending their gradient back; 0 where no layer before trains."""
    exchange: Floats
    """Exchanges of ranks that share the pack, in the forward pass."""
    exchange_back: Floats
    """Exchanges of ranks that share the pack, in the backward pass and in recomputation."""

    @classmethod
    def by_level(cls, several: "Sequence[PackSeconds]", levels: Ints) -> "PackSeconds":
        """Take the seconds of each pack from the `PackSeconds` of its level, [packs]."""
        packs = np.arange(len(levels))
        return replace(
            several[0],
            **{name: np.stack([getattr(one, name) for one in several])[levels, packs] for name in _of_packs()},
        )

    @property
    def loaded_forward(self) -> Floats:
        """Forward passes with the loading that they wait for, as the schedule runs them."""
        return self.load + self.forward

    @property
    def shared_forward(self) -> Floats:
        """Loading and the forward pass, with the exchanges of ranks that share the pack."""
        return self.loaded_forward + self.exchange

    @property
    def shared_backward(self) -> Floats:
        """Backward passes with the exchanges of ranks that share the pack."""
        return self.backward + self.exchange_back

    @property
    def deferred(self) -> DeferredWeights | None:
        """Deferred weight gradients; None where there are none."""
        return DeferredWeights(self.weights, self.most_deferred) if self.weights.any() else None


def _of_packs() -> list[str]:
    """Return the names of the seconds by pack."""
    return [field.name for field in fields(PackSeconds) if field.name != "most_deferred"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slowness:
    """How much longer than in `PackSeconds` the ranks take, [data ranks, stages]."""

    work: Floats
    """Factor of the forward and backward passes."""
    load: Floats
    """Factor of the waiting for data."""
    wait: Floats
    """Further seconds of waiting for the data of each pack."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateSeconds:
    """Seconds of the reduction and the optimizer after the passes of a step, [stages]."""

    reduction: Floats
    optimizer: Floats
    together: Bools
    """Whether the stage adds up gradients with another one, so that both begin when the later of them is there."""

    @property
    def seconds(self) -> Floats:
        """Reduction of gradients and optimizer together."""
        return self.reduction + self.optimizer

    def begins(self, ends: Floats) -> Floats:
        """Return when stages begin their reduction that end their passes at these times, [..., stages]."""
        return begun_together(ends, self.together)


def begun_together(ends: Floats, together: Bools) -> Floats:
    """Return the ends, with those of stages that begin `together` at the latest of them; stages are the last axis."""
    if not together.any():
        return ends
    latest = np.where(together, ends, 0.0).max(axis=-1, keepdims=True)
    begun: Floats = np.where(together, latest, ends)
    return begun


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Breakdown:
    """Seconds of the parts of steps, [steps] each."""

    ideal: Floats
    """Work of the samples alone, spread evenly over all ranks."""
    padding: Floats
    """Pad tokens, and placeholders for missing images and samples."""
    recompute: Floats
    stage_imbalance: Floats
    """Work of the busiest stage above that of the mean stage, on average over the data ranks."""
    data_imbalance: Floats
    """Work of the busiest stage of the slowest data rank above that of the mean data rank; waiting of stages, and of
    ranks that share packs, for each other because the packs of a step are uneven; and work beyond equal parts of a
    pack."""
    bubble: Floats
    """Waiting of the busiest stage for its neighbours as the pipeline fills and drains."""
    loading: Floats
    """Reading and encoding the data, and waiting of other ranks for that."""
    communication: Floats
    """Sends between stages, exchanges of ranks that share packs, and the reduction of gradients over data ranks."""
    optimizer: Floats

    @property
    def seconds(self) -> Floats:
        """Seconds of the whole steps, [steps]."""
        total: Floats = np.sum([getattr(self, field.name) for field in fields(self)], axis=0)
        return total

    @property
    def totals(self) -> dict[str, float]:
        """Seconds of all steps together, by part."""
        return {field.name: float(getattr(self, field.name).sum()) for field in fields(self)}

    @classmethod
    def joined(cls, several: "Sequence[Breakdown]") -> "Breakdown":
        """Concatenate the steps of several breakdowns."""
        return cls(
            **{field.name: np.concatenate([getattr(one, field.name) for one in several]) for field in fields(cls)}
        )


def attribute_all(
    blocks: Iterable[Ints],
    seconds: PackSeconds,
    update: UpdateSeconds,
    slowness: Slowness | None = None,
    waiting: Waiting | None = None,
) -> tuple[Breakdown, Floats]:
    """Return the results of `attribute` for the steps of all blocks, in their order."""
    breakdowns, works = zip(*(attribute(block, seconds, update, slowness, waiting) for block in blocks), strict=True)
    return Breakdown.joined(breakdowns), np.concatenate(works)


def attribute(
    packs: Ints,
    seconds: PackSeconds,
    update: UpdateSeconds,
    slowness: Slowness | None = None,
    waiting: Waiting | None = None,
) -> tuple[Breakdown, Floats]:
    """Return (parts of each step, seconds in which the ranks of each stage load and run passes [steps, stages]).

    Passes include exchanges. `packs` are numbers of packs, [steps, micro-batches, data ranks]; `waiting` says which
    ranks wait for each other inside of a step, where some do.
    """
    steps, count, ranks = packs.shape
    of_ranks = packs.transpose(0, 2, 1).reshape(-1, count)
    own = _slowed(seconds, of_ranks, steps, slowness)
    stages = own.forward.shape[2]
    weights = own.deferred
    alone = simulate(own.forward, own.backward, weights=weights)
    # A single stage waits for no neighbour, whatever its packs.
    even = alone
    if stages > 1:
        of_weights = weights and weights._replace(seconds=_evened(weights.seconds))
        even = simulate(_evened(own.forward), _evened(own.backward), weights=of_weights)
    # Where no rank waits for another, or nothing is loaded or sent, simulations are equal.
    begun = partial(run_waiting, waiting, simulate, packs, weights=weights)
    uneven = alone if waiting is None else begun(own.forward, own.backward)
    with_loads = begun(own.loaded_forward, own.backward) if own.load.any() else uneven
    is_sent = any(side.any() for side in (own.sends, own.returns, own.exchange, own.exchange_back))
    shared = own.shared_forward, own.shared_backward
    schedule = begun(*shared, own.sends, own.returns) if is_sent else with_loads
    work = alone.busy.reshape(steps, ranks, stages)
    busiest = work.max(axis=2)

    def spread(of_packs: Floats) -> Floats:
        """Spread seconds of packs [steps * data ranks, micro-batches, stages] over all ranks of their step, [steps]."""
        each: Floats = of_packs.reshape(steps, -1).sum(axis=1) / (ranks * stages)
        return each

    uneven_seconds, even_seconds, loaded_seconds = (
        each.seconds.reshape(steps, ranks).max(axis=1) for each in (uneven, even, with_loads)
    )
    # Packs in a good order take less time than equal ones, which leave the last stages idle for longer.
    bubble = np.minimum(even_seconds, uneven_seconds) - busiest.max(axis=1)
    # Data ranks reduce when all of them are there; a stage waits for another one only where both have a tied weight.
    ends = update.begins(schedule.ends.reshape(steps, ranks, stages).max(axis=1)) + update.reduction
    # Passes are those of the fullest rank of a pack, and each rank has the fixed cost of its part.
    beyond = spread(own.forward + own.backward - own.recompute - own.equal_parts)
    # Each entry has one effect more than the one before, so the differences are parts that sum to the step.
    reached = (
        np.zeros(steps),
        spread(own.samples),
        spread(own.equal_parts),
        work.mean(axis=(1, 2)) - beyond,
        busiest.mean(axis=1) - beyond,
        uneven_seconds - bubble,
        uneven_seconds,
        loaded_seconds,
        ends.max(axis=1),
        (ends + update.optimizer).max(axis=1),
    )
    names = [field.name for field in fields(Breakdown)]
    busy = (own.shared_forward + own.shared_backward).sum(axis=1).reshape(steps, ranks, stages).sum(axis=1)
    return Breakdown(**dict(zip(names, np.diff(reached, axis=0), strict=True))), busy


def whole_seconds(packs: Ints, seconds: PackSeconds, update: UpdateSeconds, waiting: Waiting | None) -> Floats:
    """Return the seconds of whole steps as `attribute` does, by one simulation, [steps]."""
    steps, count, ranks = packs.shape
    own = _slowed(seconds, packs.transpose(0, 2, 1).reshape(-1, count), steps, None)
    passes = own.shared_forward, own.shared_backward, own.sends, own.returns
    schedule = run_waiting(waiting, simulate, packs, *passes, weights=own.deferred)
    ends = schedule.ends.reshape(steps, ranks, -1).max(axis=1)
    reached: Floats = (update.begins(ends) + update.reduction + update.optimizer).max(axis=1)
    return reached


def _slowed(seconds: PackSeconds, of_ranks: Ints, steps: int, slowness: Slowness | None) -> PackSeconds:
    """Return the seconds of the packs of each rank in each step, [steps * data ranks, micro-batches, stages]."""
    found = {name: getattr(seconds, name)[of_ranks] for name in _of_packs()}
    if slowness is not None:
        work, load, wait = (
            np.tile(each, (steps, 1))[:, None] for each in (slowness.work, slowness.load, slowness.wait)
        )
        slowed = ("forward", "backward", "recompute", "weights", "samples", "equal_parts")
        found |= {name: found[name] * work for name in slowed}
        found["load"] = found["load"] * load + wait
    return replace(seconds, **found)


def _evened(of_packs: Floats) -> Floats:
    """Return the seconds of as many equal packs, [n, micro-batches, stages]."""
    return np.broadcast_to(of_packs.mean(axis=1, keepdims=True), of_packs.shape)
