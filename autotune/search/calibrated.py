"""Predictions that learn from the trials of a search."""

from dataclasses import replace

import numpy as np

from autotune.predict.calibration import Calibration, Observation, Peak
from autotune.predict.chosen_steps import ChosenSteps
from autotune.predict.features import Features, scaled, stage_features, step_features
from autotune.predict.parts import Parts
from autotune.predict.predictor import Prediction, Predictor
from trials.model.cut import cut
from trials.outcome import Measurement, StageMeasurement
from trials.plan import Plan

_STEPS = 16
"""So many steps stand for an epoch where the error of its time is asked."""


class CalibratedPredictor:
    """A predictor whose times and bytes are corrected by what was measured; the same for the same trials in order."""

    def __init__(self, base: Predictor) -> None:
        self.base = base
        """From the profile alone."""
        self._observations: list[Observation] = []
        self._peaks: list[Peak] = []
        self._calibration = Calibration.fit()
        self._corrected = base

    def predict(self, plan: Plan) -> Prediction:
        """Corrected seconds and bytes. The breakdown lacks what a step was found to take beside its schedule."""
        prediction = self._corrected.predict(plan)
        return replace(
            prediction,
            step_seconds=prediction.step_seconds * self._calibration.schedule_factor,
            stage_memory=tuple(map(self._calibration.bytes, prediction.stage_memory)),
        )

    def relative_error(self, plan: Plan) -> float:
        """Standard error of the predicted `epoch_seconds`, as a share of it."""
        count = self.base.sizes(plan.packing, plan.layout).epoch.steps
        steps = np.unique(np.linspace(0, count - 1, min(count, _STEPS)).round()).astype(int).tolist()
        mean, error = self._calibration.seconds(self._features(plan, tuple(steps)))
        return error / mean

    def observe(self, plan: Plan, measurement: Measurement, warmup_steps: int) -> None:
        """Learns from a trial, which ran so many of the steps that are predicted costliest before the timed ones.

        Steps that this epoch does not have are those of a job with another seed, and teach nothing.
        """
        steps = measurement.steps
        if max(steps) >= self.base.sizes(plan.packing, plan.layout).epoch.steps:
            return
        mean = sum(measurement.step_seconds) / len(steps)
        self._observations.append(Observation(features=self._features(plan, steps), seconds=mean))
        for stage in measurement.stages:
            self._observe_stage(plan, steps, stage)
        self._peaks += peaks(self.base, plan, measurement, warmup_steps)
        self._calibration = Calibration.fit(self._observations, self._peaks)
        self._corrected = self.base.with_costs(scaled(self.base.costs, self._calibration.factors))

    def _features(self, plan: Plan, steps: tuple[int, ...]) -> Features:
        return step_features(self.base, plan, steps, self._calibration.factors)

    def _observe_stage(self, plan: Plan, steps: tuple[int, ...], stage: StageMeasurement) -> None:
        load, forward, backward, update = stage_features(self.base, plan, steps, stage.stage, stage.data_rank)
        measured = [(load, stage.load_seconds), (forward, stage.forward_seconds), (backward, stage.backward_seconds)]
        if plan.layout.data == 1:  # with more, a rank waits for the others in the reduction
            measured.append((update, stage.optimizer_seconds))
        self._observations += [
            Observation(features=features, seconds=seconds) for features, seconds in measured if sum(features) > 0
        ]


def peaks(predictor: Predictor, plan: Plan, measurement: Measurement, warmup_steps: int) -> list[Peak]:
    """Measured bytes of each stage, beside those predicted for the steps that the trial ran."""
    costliest = np.argsort(-predictor.predict(plan).step_seconds, kind="stable")[:warmup_steps].tolist()
    sizes = ChosenSteps(predictor.sizes(plan.packing, plan.layout), tuple({*measurement.steps, *costliest}))
    predicted = predictor.stage_memory(Parts.of(cut(plan)), plan.layout, sizes)
    return [
        Peak(
            predicted=of_stage,
            measured=max(stage.peak_bytes for stage in measurement.stages if stage.stage == number),
        )
        for number, of_stage in enumerate(predicted)
    ]
