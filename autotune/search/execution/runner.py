"""Runs a plan on the hardware, and estimates the seconds of an epoch from its steps."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, stdev

import numpy as np

from autotune.machine.conditions import MachineWatch, Watch, disturbance
from autotune.prediction.predictor import Prediction
from autotune.prediction.trial_steps import spread_steps, trial_steps
from autotune.search.execution.run_result import RunResult, StepCallback
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.roles import BASELINES, REPEATS, Role
from autotune.search.solver.limits import Limits
from autotune.workload import Prepared
from storage.records import DisturbedRun
from trials.data.latest import BlankSamples
from trials.errors import InvalidPlan
from trials.model.cut import check_layers
from trials.outcome import Cause, Completed, Failed, Measurement, OutOfMemory, Rejected, waiting_apart
from trials.plan import Plan
from trials.run.pool import Answers, Pool
from trials.tasks.answer import TrialReport
from trials.tasks.request import Trial
from trials.units import number_of
from trials.workload import Hardware

_log = logging.getLogger(__name__)
# A choice: with three steps the error of their mean has two degrees of freedom.
_LEAST_STEPS = 3
"""Timed steps that a trial runs at least, since fewer may agree by chance."""


class Runner:
    """Runner of trials on a pool of ranks, one at a time."""

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
        self._blanks = BlankSamples()
        # On a machine that is disturbed all the time, repeats would only cost time.
        self._was_undisturbed = True

    def rejection(self, plan: Plan, role: Role = Role.SAMPLED) -> Rejected | None:
        """Return why the plan need not run: it is invalid, changes what is learned or surely needs more memory.

        A baseline stands for what people do: with steps unlike random ones it runs even so, and a warning says it.
        """
        model = self._prepared.workload.model
        try:
            check_layers(
                plan, vision_layers=model.vision_layers, language_layers=model.language_layers, dtype=model.dtype
            )
        except InvalidPlan as error:
            return Rejected(reason=str(error))
        prediction = self._predictor.predict(plan)
        if not prediction.keeps_batch:
            return Rejected(reason=f"its steps miss the global batch by {prediction.batch_deviation:.0%}")
        if faults := self._predictor.learning_faults(plan):
            if role not in (*BASELINES, *REPEATS):
                return Rejected(reason=f"it changes what is learned: {faults[0]}")
            if role in BASELINES:
                first, *others = faults
                more = f"; {number_of(len(others), 'more reason')}, which -v lists" if others else ""
                _log.warning("baseline %s is only compared, since it changes what is learned: %s%s", role, first, more)
                for fault in others:
                    _log.info("baseline %s also changes what is learned: %s", role, fault)
        limits = Limits.of(self._prepared.workload, self._prepared.job.search.parallel)
        limit = limits.memory_limit_bytes
        for stage, needed in enumerate(prediction.stage_memory):
            if needed.low > limit:  # where the interval reaches below it, only the run itself decides
                needs, least, has = (size / (1 << 20) for size in (needed.expected, needed.low, limit))
                return Rejected(
                    reason=f"stage {stage} is predicted to need {needs:.0f} MiB, {least:.0f} MiB at least, "
                    f"limit {has:.0f} MiB"
                )
            if needed.host > limits.host_limit_bytes:
                needs, has = (size / (1 << 20) for size in (needed.host, limits.host_limit_bytes))
                return Rejected(
                    reason=f"stage {stage} is predicted to offload {needs:.0f} MiB to the host's memory, limit "
                    f"{has:.0f} MiB for each rank"
                )
        return None

    def run(
        self,
        plan: Plan,
        on_step: StepCallback | None = None,
        on_wait: Callable[[], None] = lambda: None,
        timed_steps: int | None = None,
    ) -> RunResult:
        """Run warm-up and timed steps, until their mean is as sure as asked for or `on_step` returns False.

        With `timed_steps`, this number of steps of all costs is timed, else at most `search.timed_steps` typical ones.
        A disturbed run is repeated once, without `on_step`, and the repeat counts. `on_wait` is called many times a
        second; what it raises ends the ranks and is raised.
        """
        search = self._prepared.job.search
        prediction = self._predictor.base.predict(plan)
        if timed_steps:
            task = spread_steps(prediction, search.warmup_steps, timed_steps)
        else:
            task = trial_steps(prediction, search.warmup_steps, search.timed_steps)
        request = self._prepared.request(plan, task)
        disturbed: tuple[DisturbedRun, ...] = ()
        began = self._clock()
        for callback in (on_step, None) if self._was_undisturbed else (on_step,):
            with self._watch(self._prepared.workload.hardware) as watch:
                steering = _Steering(prediction, task, 0.0 if timed_steps else search.step_error, callback, watch)
                answer = self._pool.ask(request, search.trial_timeout, on_wait=on_wait, on_step=steering.shall_go_on)
            self._tell_of_blanks(plan, answer)
            run = _run_result(task, prediction, answer, shortened=steering.shortened)
            conditions = watch.conditions
            reason = disturbance(conditions, self._prepared.workload.hardware, search.parallel)
            is_short_of_memory = isinstance(run.outcome, Failed) and isinstance(run.outcome.cause, OutOfMemory)
            if is_short_of_memory and not conditions.disturbing_gpu:
                reason = None  # others made it slower, but took none of its memory
            energy = _energy_joules(run, conditions.power_watts)
            result = replace(run, disturbance=reason, disturbed=disturbed, energy_joules=energy)
            if reason is None:
                break
            disturbed += (DisturbedRun(outcome=run.outcome, epoch_seconds=run.epoch_seconds, disturbance=reason),)
        self._was_undisturbed = reason is None
        return replace(result, seconds=self._clock() - began)

    def _tell_of_blanks(self, plan: Plan, answer: Answers | Cause) -> None:
        if not isinstance(answer, Answers):
            return
        report = answer.reports[0]
        if isinstance(report, TrialReport) and self._blanks.add(report.blank_samples, report.blank_reason):
            _log.warning(
                "in trials until that of plan %s, %s; a blank sample loads faster than others",
                plan.id,
                str(self._blanks),
            )


class _Steering:
    """The decision after each timed step whether a trial goes on."""

    def __init__(
        self, prediction: Prediction, task: Trial, error: float, on_step: StepCallback | None, watch: Watch
    ) -> None:
        self.shortened = False
        """Whether it ended before its measurement was complete."""
        self._predicted = prediction.step_seconds[list(task.timed_steps)].tolist()
        self._epoch_seconds = prediction.epoch_seconds
        self._error = error
        self._on_step, self._watch = on_step, watch
        self._ratios: list[float] = []

    def shall_go_on(self, seconds: float) -> bool:
        """Return whether the trial goes on after a step that took `seconds`."""
        self._watch.step()
        self._ratios.append(seconds / self._predicted[len(self._ratios)])
        is_wanted = self._on_step is None or self._on_step(self._ratios[-1] * self._epoch_seconds)
        self.shortened = not (is_wanted or self._is_complete)
        return is_wanted and not self._is_complete

    @property
    def _is_complete(self) -> bool:
        """Whether all steps were timed, or enough for their mean to be as sure as asked for."""
        count = len(self._ratios)
        if count == len(self._predicted):
            return True
        return count >= _LEAST_STEPS and stdev(self._ratios) / math.sqrt(count) <= self._error * fmean(self._ratios)


def estimate_epoch(measurement: Measurement, prediction: Prediction) -> tuple[float, float]:
    """Return (seconds of an epoch, standard error): the measured time, scaled by the predictions of both.

    The error comes from the mean ratio of measured to predicted step times.
    """
    measured = np.array(measurement.step_seconds)
    predicted = prediction.step_seconds[list(measurement.steps)]
    scale = prediction.epoch_seconds / predicted.sum()
    ratios = measured / predicted
    spread = float(ratios.std(ddof=1) / ratios.mean()) if len(ratios) > 1 else 0.0
    seconds = float(measured.sum() * scale)
    return seconds, seconds * spread / math.sqrt(len(ratios))


def _energy_joules(run: RunResult, power_watts: float | None) -> float | None:
    if power_watts is None or not isinstance(run.outcome, Completed):
        return None
    return power_watts * sum(run.outcome.measurement.step_seconds)


def _run_result(task: Trial, prediction: Prediction, answer: Answers | Cause, *, shortened: bool) -> RunResult:
    if not isinstance(answer, Answers):
        return RunResult(outcome=Failed(cause=answer))
    reports = [report for report in answer.reports if isinstance(report, TrialReport)]
    first = reports[0]
    measurement = Measurement(
        steps=task.timed_steps[: len(first.step_seconds)],
        # A step takes as long as its slowest rank.
        step_seconds=tuple(max(times) for times in zip(*(report.step_seconds for report in reports), strict=True)),
        samples=first.samples,
        text_tokens=first.text_tokens,
        vision_units=first.vision_units,
        losses=first.losses,
        stages=waiting_apart([report.stage for report in reports]),
    )
    seconds, error = estimate_epoch(measurement, prediction)
    completed = Completed(measurement=measurement, shortened=shortened)
    return RunResult(outcome=completed, epoch_seconds=seconds, epoch_seconds_error=error)
