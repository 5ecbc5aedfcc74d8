"""Schedule of the learning rate: a function of the step number alone, so that a resumed training continues it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

import numpy as np

from trials.errors import TrialsError
from trials.job import ScheduleName, TrainingSection
from trials.units import number_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Factor of the configured learning rates in each optimizer step, as the schedules of transformers have it."""

    name: ScheduleName
    warmup: int
    """Steps of the linear warm-up from 0."""
    total: int
    """Steps of the training."""
    pace: tuple[tuple[int, float], ...] = ()
    """(steps done, steps of the schedule) where the plan was changed, so that both differ; linear between two."""

    def factor(self, step: int) -> float:
        """Return the factor of a step; the first step is 1."""
        done = float(step - 1)
        if self.pace:
            done = float(np.interp(done, [steps for steps, _ in self.pace], [position for _, position in self.pace]))
        if done < self.warmup:
            return done / self.warmup
        share = (done - self.warmup) / max(1, self.total - self.warmup)
        match self.name:
            case "constant":
                return 1.0
            case "linear":
                return 1.0 - share
            case "cosine":
                return 0.5 * (1.0 + math.cos(math.pi * share))


def schedule_of(training: TrainingSection, epochs: Sequence[int]) -> Schedule:
    """Return the schedule of a training whose epochs have these numbers of steps.

    Raise TrialsError for a warm-up that is longer than the training.
    """
    total = min(sum(epochs), training.max_steps or sum(epochs))
    # Decimal, because 100 times the float 0.07 is above 7.
    share = training.warmup < 1
    warmup = math.ceil(Decimal(str(training.warmup)) * total) if share else int(training.warmup)
    if warmup > total:
        raise TrialsError(
            f"training.warmup: {number_of(warmup, 'step is', 'steps are')} more than the {number_of(total, 'step')} of "
            "the training; lower it, give a share below 1, or train longer"
        )
    return Schedule(name=training.schedule, warmup=warmup, total=total)
