"""One typical step of a plan, pass by pass: when each begins and ends, and what each stage keeps meanwhile."""

from dataclasses import dataclass

import numpy as np

from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Prediction, Predictor
from autotune.prediction.simulation.schedule import simulate, trace
from autotune.prediction.simulation.synchronization import run_waiting
from trials.arrays import Floats
from trials.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """A step of one data rank; times are seconds from its beginning."""

    step: int
    """Number of the step in the epoch, from 0."""
    data_rank: int
    """The slowest one."""
    forward: Floats
    """Begin and end of each pass, [micro-batches, stages, 2]."""
    backward: Floats
    weights: Floats | None
    """Begin and end of deferred weight gradients, of the same shape; None with 1F1B."""
    update: Floats
    """Begin and end of reduction and optimizer, [stages, 2]."""
    kept_bytes: Floats
    """Bytes of each micro-batch on each stage from its forward to its backward pass, [micro-batches, stages]."""
    deferred_bytes: Floats
    """Bytes from its backward pass until its deferred weight gradients are computed; 0 with 1F1B."""
    static_bytes: tuple[float, ...]
    """Weights, gradients and optimizer states of each stage."""

    @property
    def seconds(self) -> float:
        return float(self.update.max())

    @property
    def stages(self) -> int:
        return len(self.static_bytes)

    @property
    def waiting_shares(self) -> tuple[float, ...]:
        """Share of the step in which each stage waits, sends or receives: between its passes and its update."""
        passes = [each for each in (self.forward, self.backward, self.weights) if each is not None]
        begins, ends = np.moveaxis(np.concatenate((*passes, self.update[None])), -1, 0)
        shares: list[float] = (1 - (ends - begins).sum(axis=0) / self.seconds).tolist()
        return tuple(shares)

    def memory(self, stage: int) -> tuple[Floats, Floats]:
        """Return (times, bytes at these times) of one stage; a pass allocates, or frees, at a constant rate."""
        kept, deferred = self.kept_bytes[:, stage], self.deferred_bytes[:, stage]
        changes = [(self.forward, kept), (self.backward, deferred - kept)]
        if self.weights is not None:
            changes.append((self.weights, -deferred))
        edges = np.unique(np.concatenate([*(times[:, stage] for times, _ in changes), [[0.0, self.seconds]]]))
        held = np.full(edges.shape, self.static_bytes[stage])
        for times, change in changes:
            begins, ends = times[:, stage].T
            # A pass without costs takes no time.
            length = np.maximum(ends - begins, np.finfo(np.float64).tiny)
            held += np.clip((edges[:, None] - begins) / length, 0.0, 1.0) @ change
        return edges, held


def timeline(predictor: Predictor, plan: Plan, prediction: Prediction) -> Timeline:
    """Return a typical step of the plan, on its slowest data rank."""
    step = int(np.argmin(prediction.step_distances))
    sizes, of_levels = predictor.sizes(plan.packing, plan.layout), Parts.of_levels(plan)
    parts = of_levels[0]
    rows = sizes.epoch.rows(step)
    # [data ranks, micro-batches]: each rank is simulated as a step of its own.
    packs = rows.T
    seconds = predictor.times.plan_seconds(plan, sizes)
    update = predictor.times.update_parts(plan.layout, parts, sizes)
    sides = (seconds.shared_forward, seconds.shared_backward, seconds.sends, seconds.returns)
    forward, backward, sends, returns = (side[packs] for side in sides)
    weights = seconds.deferred and seconds.deferred._replace(seconds=seconds.weights[packs])
    waiting = predictor.times.waiting(parts, plan.layout, sizes)
    times = forward, backward, sends, returns
    schedule = run_waiting(waiting, simulate, rows[None], *times, weights=weights)
    passes = run_waiting(waiting, trace, rows[None], *times, weights=weights)
    rank, ended = int(schedule.seconds.argmax()), passes.weight_ends
    # The reduction begins when all data ranks are there.
    begins = update.begins(schedule.ends.max(axis=0))
    return Timeline(
        step=step,
        data_rank=rank,
        forward=_spans(passes.forward_ends, forward)[rank],
        backward=_spans(passes.backward_ends, backward if weights is None else backward - weights.seconds)[rank],
        weights=None if weights is None or ended is None else _spans(ended, weights.seconds)[rank],
        update=np.stack((begins, begins + update.seconds), axis=-1),
        kept_bytes=predictor.memory.kept(of_levels, plan.layout, sizes)[packs[rank]],
        deferred_bytes=predictor.memory.deferred(of_levels, plan.layout, sizes)[packs[rank]],
        static_bytes=tuple(stage.static for stage in prediction.stage_memory),
    )


def _spans(ends: Floats, seconds: Floats) -> Floats:
    """Return (begin, end) of passes in a further dimension."""
    return np.stack((ends - seconds, ends), axis=-1)
