"""Predictions that learn from the trials of a search."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from autotune.predict.calibration import Calibration, Observation, Peak
from autotune.predict.chosen_steps import ChosenSteps
from autotune.predict.features import Features, scaled, stage_features, step_features
from autotune.predict.memory import StageBytes
from autotune.predict.parts import Parts
from autotune.predict.predictor import Prediction, Predictor
from autotune.search.trial_steps import trial_steps
from trials.job import SearchSection
from trials.model.cut import cut
from trials.outcome import Completed, Failed, Measurement, Outcome, OutOfMemory, StageMeasurement
from trials.plan import Plan

_STEPS = 16
"""So many steps stand for an epoch where the error of its time is asked."""


class CalibratedPredictor:
    """A predictor whose times and bytes are corrected by what was measured; the same for the same trials in order."""

    def __init__(self, base: Predictor) -> None:
        self.base = base
        """From the profile alone."""
        self.corrected = base
        """With the seconds of its layer costs corrected; not what a step takes beside its schedule, nor bytes."""
        self.trials = 0
        """So many have taught something."""
        self._observations: list[Observation] = []
        self._peaks: list[Peak] = []
        self._exceeded: list[Peak] = []
        self._calibration = Calibration.fit()

    def predict(self, plan: Plan) -> Prediction:
        """Corrected seconds and bytes. The breakdown lacks what a step was found to take beside its schedule."""
        prediction = self.corrected.predict(plan)
        return replace(
            prediction,
            step_seconds=prediction.step_seconds * self._calibration.schedule_factor,
            stage_memory=tuple(map(self._calibration.bytes, prediction.stage_memory)),
        )

    def relative_error(self, plan: Plan) -> float:
        """Standard error of the predicted `epoch_seconds`, as a share of it."""
        count = self.base.sizes(plan.packing, plan.layout).epoch.steps
        steps = np.unique(np.linspace(0, count - 1, min(count, _STEPS)).round()).astype(int).tolist()
        mean, error = self._calibration.seconds(self._features(self.base, plan, tuple(steps)))
        return error / mean

    def learn(self, plan: Plan, outcome: Outcome, settings: SearchSection, *, base: Predictor | None = None) -> None:
        """From any trial: its measurement, or what it ran out of memory with; nothing from others.

        `base` has the layer costs for the number of devices that the trial ran on, where that is another one.
        """
        match outcome:
            case Completed(measurement=measurement):
                self.observe(plan, measurement, settings.warmup_steps, base=base)
            case Failed(cause=OutOfMemory() as cause):
                self._exceed(plan, cause, settings)
            case _:
                pass

    def observe(
        self, plan: Plan, measurement: Measurement, warmup_steps: int, *, base: Predictor | None = None
    ) -> None:
        """Learns from a trial, which ran so many of the steps that are predicted costliest before the timed ones.

        Steps that this epoch does not have are those of a job with another seed, and teach nothing.
        """
        base, steps = base or self.base, measurement.steps
        if max(steps) >= self.base.sizes(plan.packing, plan.layout).epoch.steps:
            return
        mean = sum(measurement.step_seconds) / len(steps)
        self._observations.append(Observation(features=self._features(base, plan, steps), seconds=mean))
        for stage in measurement.stages:
            self._observations += _stage_observations(base, plan, steps, stage)
        self._peaks += peaks(self.base, plan, measurement, warmup_steps)
        self._fit()

    def _exceed(self, plan: Plan, cause: OutOfMemory, settings: SearchSection) -> None:
        """The stage needs at least so much in the steps of a trial; it may have come to all of them."""
        steps = trial_steps(self.base.predict(plan), settings)
        predicted = _bytes_in(self.base, plan, (*steps.warmup_steps, *steps.timed_steps))[cause.stage]
        self._exceeded.append(Peak(predicted=predicted, measured=cause.needed_bytes))
        self._fit()

    def _fit(self) -> None:
        self.trials += 1
        self._calibration = Calibration.fit(self._observations, self._peaks, self._exceeded)
        self.corrected = self.base.with_costs(scaled(self.base.costs, self._calibration.factors))

    def _features(self, base: Predictor, plan: Plan, steps: tuple[int, ...]) -> Features:
        return step_features(base, plan, steps, self._calibration.factors)


def _stage_observations(
    base: Predictor, plan: Plan, steps: tuple[int, ...], stage: StageMeasurement
) -> list[Observation]:
    load, forward, backward, update = stage_features(base, plan, steps, stage.stage, stage.data_rank)
    measured = [(load, stage.load_seconds), (forward, stage.forward_seconds), (backward, stage.backward_seconds)]
    if plan.layout.data == 1:  # with more, a rank waits for the others in the reduction
        measured.append((update, stage.optimizer_seconds))
    return [Observation(features=features, seconds=seconds) for features, seconds in measured if sum(features) > 0]


def peaks(predictor: Predictor, plan: Plan, measurement: Measurement, warmup_steps: int) -> list[Peak]:
    """Measured bytes of each stage, beside those predicted for the steps that the trial ran."""
    costliest = np.argsort(-predictor.predict(plan).step_seconds, kind="stable")[:warmup_steps].tolist()
    return [
        Peak(
            predicted=of_stage,
            measured=max(stage.peak_bytes for stage in measurement.stages if stage.stage == number),
        )
        for number, of_stage in enumerate(_bytes_in(predictor, plan, (*measurement.steps, *costliest)))
    ]


def _bytes_in(predictor: Predictor, plan: Plan, steps: Iterable[int]) -> tuple[StageBytes, ...]:
    """Of each stage, in these steps alone."""
    sizes = ChosenSteps(predictor.sizes(plan.packing, plan.layout), tuple({*steps}))
    return predictor.stage_memory(Parts.of(cut(plan)), plan.layout, sizes)
