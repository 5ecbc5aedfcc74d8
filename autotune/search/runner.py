"""Runs a plan on the hardware and says what came of it, in seconds per epoch."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from autotune.conditions import Conditions, Watch, contamination
from autotune.predict.predictor import MOST_BATCH_DEVIATION, Prediction
from autotune.search.calibrated import CalibratedPredictor
from autotune.search.trial_steps import trial_steps
from autotune.workload import Prepared
from trials.errors import InvalidPlan
from trials.outcome import Cause, Completed, Crash, Failed, Measurement, Outcome, Rejected
from trials.plan import Plan
from trials.run.pool import Answers, WarmPool
from trials.run.report import TrialReport
from trials.run.request import Trial
from trials.workload import Hardware

_REPEATS = 1
"""How often a trial is run again when the machine was disturbed: a second disturbance is likely to last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What one run of a plan gave."""

    outcome: Outcome
    epoch_seconds: float | None = None
    epoch_seconds_error: float | None = None
    """Standard error, from the scatter of the timed steps around the prediction."""
    contamination: str | None = None
    """Why it should not be trusted, in words: what else the machine did meanwhile."""
    energy_joules: float | None = None
    """What all devices consumed, from the start of the trial to its end, warm-up included."""


class Runner:
    """Runs trials on a pool of ranks."""

    def __init__(
        self,
        prepared: Prepared,
        predictor: CalibratedPredictor,
        pool: WarmPool,
        watch: Callable[[Hardware], Watch] = Watch,
    ) -> None:
        self._prepared = prepared
        self._predictor = predictor
        self._pool = pool
        self._watch = watch

    def rejection(self, plan: Plan) -> Rejected | None:
        """Why the plan need not run: it is not valid, misses the global batch or certainly needs more memory."""
        model = self._prepared.workload.model
        try:
            plan.check(vision_layers=model.vision_layers, language_layers=model.language_layers)
        except InvalidPlan as error:
            return Rejected(reason=str(error))
        prediction = self._predictor.predict(plan)
        if prediction.batch_deviation > MOST_BATCH_DEVIATION:
            return Rejected(reason=f"its steps miss the global batch by {prediction.batch_deviation:.0%}")
        limit = self._prepared.workload.memory_limit_bytes
        for stage, needed in enumerate(prediction.stage_memory):
            if needed.low > limit:  # where the interval reaches below it, only the run itself decides
                needs, least, has = (size / (1 << 20) for size in (needed.expected, needed.low, limit))
                return Rejected(
                    reason=f"stage {stage} is predicted to need {needs:.0f} MiB, {least:.0f} MiB at least, "
                    f"limit {has:.0f} MiB"
                )
        return None

    def run(self, plan: Plan) -> Attempt:
        """A warm-up and some timed steps; once more, which then counts, when the machine was disturbed."""
        search = self._prepared.job.search
        prediction = self._predictor.base.predict(plan)
        task = trial_steps(prediction, search)
        request = self._prepared.request(plan, task)
        for _ in range(1 + _REPEATS):
            with self._watch(self._prepared.workload.hardware) as watch:
                answer = self._pool.ask(request, search.trial_timeout)
            attempt = self._under(watch.conditions, _attempt(task, prediction, answer))
            if attempt.contamination is None:
                break
        return attempt

    def _under(self, conditions: Conditions, attempt: Attempt) -> Attempt:
        reason = contamination(conditions, self._prepared.workload.hardware)
        return replace(attempt, contamination=reason, energy_joules=conditions.energy_joules)


def estimate_epoch(measurement: Measurement, prediction: Prediction) -> tuple[float, float]:
    """(seconds of an epoch, standard error): the measured time, times what more the whole epoch is predicted to cost.

    The error is that of the mean of the steps' measured over predicted time.
    """
    measured = np.array(measurement.step_seconds)
    predicted = prediction.step_seconds[list(measurement.steps)]
    scale = prediction.epoch_seconds / predicted.sum()
    ratios = measured / predicted
    spread = float(ratios.std(ddof=1) / ratios.mean()) if len(ratios) > 1 else 0.0
    seconds = float(measured.sum() * scale)
    return seconds, seconds * spread / math.sqrt(len(ratios))


def _attempt(task: Trial, prediction: Prediction, answer: Answers | Cause) -> Attempt:
    if not isinstance(answer, Answers):
        return Attempt(outcome=Failed(cause=answer))
    measurement = _measurement(task, answer)
    if isinstance(measurement, Crash):
        return Attempt(outcome=Failed(cause=measurement))
    seconds, error = estimate_epoch(measurement, prediction)
    return Attempt(outcome=Completed(measurement=measurement), epoch_seconds=seconds, epoch_seconds_error=error)


def _measurement(task: Trial, answer: Answers) -> Measurement | Crash:
    reports = [report for report in answer.reports if isinstance(report, TrialReport)]
    first = reports[0]
    steps = task.timed_steps[: len(first.step_seconds)]
    for step, loss in zip(steps, first.losses, strict=True):
        if not math.isfinite(loss):
            return Crash(rank=0, detail=f"the loss of step {step} is {loss}; lower training.learning_rate")
    return Measurement(
        steps=steps,
        step_seconds=tuple(max(times) for times in zip(*(report.step_seconds for report in reports), strict=True)),
        samples=first.samples,
        text_tokens=first.text_tokens,
        vision_units=first.vision_units,
        losses=first.losses,
        stages=tuple(report.stage for report in reports),
    )
