"""One typical step of a plan, pass by pass: when each begins and ends, and what each stage keeps meanwhile."""

from dataclasses import dataclass

import numpy as np

from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Prediction, Predictor
from autotune.prediction.simulation.schedule import simulate, trace
from trials.arrays import Floats
from trials.model.cut import cut
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
    update: Floats
    """Begin and end of reduction and optimizer, [stages, 2]."""
    kept_bytes: Floats
    """Bytes of each micro-batch on each stage from its forward to its backward pass, [micro-batches, stages]."""
    static_bytes: tuple[float, ...]
    """Weights, gradients and optimizer states of each stage."""

    @property
    def seconds(self) -> float:
        return float(self.update.max())

    @property
    def stages(self) -> int:
        return len(self.static_bytes)

    def memory(self, stage: int) -> tuple[Floats, Floats]:
        """Return (times, bytes at these times) of one stage; a pass allocates, or frees, at a constant rate."""
        edges = np.unique(np.concatenate([self.forward[:, stage], self.backward[:, stage], [[0.0, self.seconds]]]))
        kept = np.full(edges.shape, self.static_bytes[stage])
        for (begins, ends), sign in ((self.forward[:, stage].T, 1.0), (self.backward[:, stage].T, -1.0)):
            # A pass without costs takes no time.
            length = np.maximum(ends - begins, np.finfo(np.float64).tiny)
            done = np.clip((edges[:, None] - begins) / length, 0.0, 1.0)
            kept += sign * done @ self.kept_bytes[:, stage]
        return edges, kept


def timeline(predictor: Predictor, plan: Plan, prediction: Prediction) -> Timeline:
    """Return a typical step of the plan, on its slowest data rank."""
    step = int(np.argmin(prediction.step_distances))
    sizes, parts = predictor.sizes(plan.packing, plan.layout), Parts.of(cut(plan))
    rows = sizes.epoch.rows(step)
    # [data ranks, micro-batches]: each rank is simulated as a step of its own.
    packs = rows.T
    seconds = predictor.times.plan_seconds(plan, sizes)
    update = predictor.times.update_parts(plan.layout, parts, sizes).seconds
    sides = (seconds.shared_forward, seconds.shared_backward, seconds.sends, seconds.returns)
    forward, backward, sends, returns = (side[packs] for side in sides)
    sharing = predictor.times.sharing(parts, plan.layout, sizes)
    synchronization = None if sharing is None else sharing.synchronization(rows[None])
    schedule = simulate(forward, backward, sends, returns, synchronization)
    passes = trace(forward, backward, sends, returns, synchronization)
    rank = int(schedule.seconds.argmax())
    # The reduction begins when all data ranks are there.
    begins = schedule.ends.max(axis=0)
    return Timeline(
        step=step,
        data_rank=rank,
        forward=np.stack((passes.forward_ends - forward, passes.forward_ends), axis=-1)[rank],
        backward=np.stack((passes.backward_ends - backward, passes.backward_ends), axis=-1)[rank],
        update=np.stack((begins, begins + update), axis=-1),
        kept_bytes=predictor.memory.kept(Parts.of_levels(plan), plan.layout, sizes)[packs[rank]],
        static_bytes=tuple(stage.static for stage in prediction.stage_memory),
    )
