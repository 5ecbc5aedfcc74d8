"""Attribution of the time of a step to parts that sum to the whole, each by one cause added to an ideal step.

The causes are added in this order, so that no part is negative: padding, recomputation, loading of data, stages of
unequal work, data ranks of unequal work, the pipeline's order, communication, the optimizer. docs/methods.md defines
each.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from autotune.predict.costs import Array
from autotune.predict.schedule import simulate
from trials.data.records.sample import Ints


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackSeconds:
    """Seconds of packs on the stages of a plan, [packs, stages] unless stated otherwise."""

    load: Array
    """Waiting for the pack's data, before its forward pass."""
    forward: Array
    backward: Array
    """Recomputation included."""
    recompute: Array
    """The part of `backward` that is recomputation."""
    samples: Array
    """The samples alone on all stages together, without padding and recomputation, [packs]."""
    sends: Array
    """Sending the states from each stage to the next, [packs, stages - 1]."""
    returns: Array
    """Sending their gradient back; 0 where no layer before trains."""

    @property
    def loaded_forward(self) -> Array:
        """Forward passes with the loading that they wait for, as the schedule runs them."""
        return self.load + self.forward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UpdateSeconds:
    """Seconds of the reduction and the optimizer after the passes of a step, [stages]."""

    reduction: Array
    optimizer: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Breakdown:
    """Seconds of the parts of steps, [steps] each."""

    ideal: Array
    """Work of the samples alone, spread evenly over all ranks."""
    padding: Array
    recompute: Array
    loading: Array
    """Reading and encoding the data."""
    stage_imbalance: Array
    """Work of the busiest stage above that of the mean stage, on average over the data ranks."""
    data_imbalance: Array
    """Work of the busiest stage of the slowest data rank above that of the mean data rank."""
    bubble: Array
    """Waiting of the busiest stage for its neighbours, as the pipeline fills and drains and where packs are uneven."""
    communication: Array
    """Sends between stages, and the reduction of gradients over data ranks."""
    optimizer: Array

    @property
    def seconds(self) -> Array:
        """Seconds of the whole steps, [steps]."""
        total: Array = np.sum([getattr(self, field.name) for field in fields(self)], axis=0)
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


def attribute(packs: Ints, seconds: PackSeconds, update: UpdateSeconds) -> tuple[Breakdown, Array]:
    """Return (parts of each step, seconds in which the ranks of each stage run passes [steps, stages]).

    `packs` are numbers of packs, [steps, micro-batches, data ranks].
    """
    steps, count, ranks = packs.shape
    of_ranks = packs.transpose(0, 2, 1).reshape(-1, count)
    passes = seconds.loaded_forward[of_ranks], seconds.backward[of_ranks]
    sends = seconds.sends[of_ranks]
    stages = passes[0].shape[2]
    schedule = simulate(*passes, sends, seconds.returns[of_ranks])
    # Where nothing is sent, as with one stage, both simulations are equal.
    without_sends = simulate(*passes) if sends.any() else schedule
    work = schedule.busy.reshape(steps, ranks, stages)
    busiest = work.max(axis=2)

    def spread(of_packs: Array) -> Array:
        """Spread seconds of packs [packs] over all ranks of their step, [steps]."""
        each: Array = of_packs[packs].sum(axis=(1, 2)) / (ranks * stages)
        return each

    # Data ranks reduce when all of them are there; a stage need not wait for the others.
    ends = schedule.ends.reshape(steps, ranks, stages).max(axis=1) + update.reduction
    reached = (
        np.zeros(steps),
        spread(seconds.samples),
        spread((seconds.forward + seconds.backward - seconds.recompute).sum(axis=1)),
        spread((seconds.forward + seconds.backward).sum(axis=1)),
        work.mean(axis=(1, 2)),
        busiest.mean(axis=1),
        busiest.max(axis=1),
        without_sends.seconds.reshape(steps, ranks).max(axis=1),
        ends.max(axis=1),
        (ends + update.optimizer).max(axis=1),
    )
    names = [field.name for field in fields(Breakdown)]
    return Breakdown(**dict(zip(names, np.diff(reached, axis=0), strict=True))), work.sum(axis=1)
