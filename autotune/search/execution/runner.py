"""Runs a plan on the hardware and says what came of it, in seconds per epoch."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, stdev

import numpy as np

from autotune.machine.conditions import Conditions, MachineWatch, Watch, contamination
from autotune.predict.predictor import MOST_BATCH_DEVIATION, Prediction
from autotune.predict.trial_steps import trial_steps
from autotune.search.execution.attempt import Attempt
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.workload import Prepared
from storage.records import DisturbedRun
from trials.errors import InvalidPlan
from trials.outcome import Cause, Completed, Failed, Measurement, Outcome, OutOfMemory, Rejected
from trials.plan import Plan
from trials.run.pool import Answers, Pool
from trials.tasks.answer import TrialReport
from trials.tasks.request import Trial
from trials.workload import Hardware

Steps = Callable[[float], bool]
"""Told the estimate of the epoch's seconds by each timed step; whether the trial shall go on."""
_LEAST_STEPS = 3
"""Fewer may agree by chance."""


class Runner:
    """Runs trials on a pool of ranks."""

    def __init__(
        self,
        prepared: Prepared,
        predictor: CalibratedPredictor,
        pool: Pool,
        watch: Callable[[Hardware], Watch] = MachineWatch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prepared = prepared
        self._predictor = predictor
        self._pool = pool
        self._watch = watch
        self._clock = clock
        self._is_left_alone = True
        """By others, as far as is known: on a machine that never is, repeats would only cost time."""

    def rejection(self, plan: Plan) -> Rejected | None:
        """Why the plan need not run: it is not valid, misses the global batch or certainly needs more memory."""
        model = self._prepared.workload.model
        try:
            plan.check(vision_layers=model.vision_layers, language_layers=model.language_layers, dtype=model.dtype)
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

    def run(self, plan: Plan, steps: Steps | None = None, on_wait: Callable[[], None] = lambda: None) -> Attempt:
        """A warm-up and some timed steps: until their mean is as sure as asked for, or `steps` ends the trial.

        Once more, to the end, when the machine was disturbed; then that one counts. `on_wait` is called many times a
        second; what it raises ends the ranks and is raised.
        """
        search = self._prepared.job.search
        prediction = self._predictor.base.predict(plan)
        task = trial_steps(prediction, search)
        request = self._prepared.request(plan, task)
        disturbed: tuple[DisturbedRun, ...] = ()
        joules: list[float | None] = []
        began = self._clock()
        for told in (steps, None) if self._is_left_alone else (steps,):
            steering = _Steering(prediction, task, search.step_error, told)
            with self._watch(self._prepared.workload.hardware) as watch:
                answer = self._pool.ask(request, search.trial_timeout, on_wait=on_wait, on_step=steering.shall_go_on)
            run = _attempt(task, prediction, answer, shortened=steering.shortened)
            conditions = watch.conditions
            attempt = replace(self._under(conditions, run), disturbed=disturbed)
            joules.append(conditions.energy_joules)
            if attempt.contamination is None:
                break
            disturbed += (
                DisturbedRun(
                    outcome=attempt.outcome,
                    epoch_seconds=attempt.epoch_seconds,
                    contamination=attempt.contamination,
                ),
            )
        self._is_left_alone = attempt.contamination is None
        return replace(attempt, seconds=self._clock() - began, energy_joules=_sum(joules))

    def _under(self, conditions: Conditions, attempt: Attempt) -> Attempt:
        reason = contamination(conditions, self._prepared.workload.hardware)
        if _is_short_of_memory(attempt.outcome) and not conditions.foreign_gpu:
            reason = None  # others made it slower, but took none of its memory
        return replace(attempt, contamination=reason)


def _sum(joules: Sequence[float | None]) -> float | None:
    """Of all runs; None where devices count none."""
    known = [each for each in joules if each is not None]
    return sum(known) if len(known) == len(joules) else None


def _is_short_of_memory(outcome: Outcome) -> bool:
    return isinstance(outcome, Failed) and isinstance(outcome.cause, OutOfMemory)


class _Steering:
    """Judges one trial step by step."""

    def __init__(self, prediction: Prediction, task: Trial, error: float, steps: Steps | None) -> None:
        self.shortened = False
        self._predicted = iter(prediction.step_seconds[list(task.timed_steps)])
        self._epoch_seconds = prediction.epoch_seconds
        self._error = error
        self._steps = steps
        self._ratios: list[float] = []

    def shall_go_on(self, seconds: float) -> bool:
        """After a step of so many seconds."""
        self._ratios.append(seconds / float(next(self._predicted)))
        if self._steps is not None and not self._steps(self._ratios[-1] * self._epoch_seconds):
            self.shortened = True
            return False
        count = len(self._ratios)
        return count < _LEAST_STEPS or stdev(self._ratios) / math.sqrt(count) > self._error * fmean(self._ratios)


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


def _attempt(task: Trial, prediction: Prediction, answer: Answers | Cause, *, shortened: bool) -> Attempt:
    if not isinstance(answer, Answers):
        return Attempt(outcome=Failed(cause=answer))
    measurement = _measurement(task, answer)
    seconds, error = estimate_epoch(measurement, prediction)
    completed = Completed(measurement=measurement, shortened=shortened)
    return Attempt(outcome=completed, epoch_seconds=seconds, epoch_seconds_error=error)


def _measurement(task: Trial, answer: Answers) -> Measurement:
    reports = [report for report in answer.reports if isinstance(report, TrialReport)]
    first = reports[0]
    steps = task.timed_steps[: len(first.step_seconds)]
    return Measurement(
        steps=steps,
        step_seconds=tuple(max(times) for times in zip(*(report.step_seconds for report in reports), strict=True)),
        samples=first.samples,
        text_tokens=first.text_tokens,
        vision_units=first.vision_units,
        losses=first.losses,
        stages=tuple(report.stage for report in reports),
    )
