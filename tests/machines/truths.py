"""What a simulated machine truly takes for plans, without noise and drift."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from autotune.prediction.chosen_steps import ChosenSteps
from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from trials.arrays import Floats, Ints
from trials.plan import Plan


class Truth(Protocol):
    """Times and peaks of plans on one machine; steps are numbered as in the epoch."""

    def epoch_seconds(self, plan: Plan) -> float:
        """Return the seconds of all steps."""

    def step_seconds(self, plan: Plan) -> Floats:
        """Return the seconds of each step, [steps]."""

    def step_samples(self, plan: Plan) -> Ints:
        """Return the samples of each step over all ranks, [steps]."""

    def stage_seconds(self, plan: Plan, steps: Sequence[int], rank: int) -> tuple[float, float, float, float]:
        """Return a rank's seconds of loading, forward, backward and update in a mean step of these."""

    def peaks(self, plan: Plan, steps: Sequence[int]) -> tuple[int, ...]:
        """Return the most bytes of each stage in these steps."""


class PredictedTruth:
    """A machine that takes exactly what a predictor says."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor

    def epoch_seconds(self, plan: Plan) -> float:
        return self._predictor.epoch_seconds(plan)

    def step_seconds(self, plan: Plan) -> Floats:
        return self._predictor.predict(plan).step_seconds

    def step_samples(self, plan: Plan) -> Ints:
        return self._predictor.sizes(plan.packing, plan.layout).step_samples

    def stage_seconds(self, plan: Plan, steps: Sequence[int], rank: int) -> tuple[float, float, float, float]:
        where, times = plan.layout.grid.coordinates(rank), self._predictor.times
        sizes = ChosenSteps(self._predictor.sizes(plan.packing, plan.layout), tuple({*steps}))
        packs = np.concatenate([block[:, :, where.data_rank].ravel() for block in sizes.blocks])
        passes = times.plan_seconds(plan, sizes)
        sides = (passes.load, passes.forward + passes.exchange, passes.shared_backward)
        load, forward, backward = (float(side[packs, where.stage].sum()) / len(sizes.steps) for side in sides)
        update = times.update_parts(plan.layout, Parts.of_levels(plan)[0], sizes).seconds
        return load, forward, backward, float(update[where.stage])

    def peaks(self, plan: Plan, steps: Sequence[int]) -> tuple[int, ...]:
        return predicted_peaks(self._predictor, plan, steps)


def predicted_peaks(predictor: Predictor, plan: Plan, steps: Sequence[int]) -> tuple[int, ...]:
    """Return the expected bytes of each stage in these steps."""
    sizes = ChosenSteps(predictor.sizes(plan.packing, plan.layout), tuple({*steps}))
    stages = predictor.stage_memory(plan, sizes)
    return tuple(round(stage.expected) for stage in stages)
