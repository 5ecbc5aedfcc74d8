"""A trial on one rank: warm-up steps, then timed steps."""

import time
from collections.abc import Iterator

from trials.data.epoch import Step
from trials.data.loader import MicroBatch
from trials.engine.engine import BACKWARD, FORWARD, LOAD, OPTIMIZER
from trials.engine.memory import static_bytes
from trials.outcome import StageMeasurement
from trials.run.report import TrialReport
from trials.run.request import Trial
from trials.run.session import Session


def run_trial(session: Session, task: Trial) -> TrialReport:
    """Runs the steps of `task` and reports the timed ones."""
    epoch = session.epoch(0)
    numbers = (*task.warmup_steps, *task.timed_steps)
    batches = session.batches(epoch, numbers)
    steps = [epoch.step(number) for number in numbers]
    warmup = len(task.warmup_steps)
    for step in steps[:warmup]:
        session.step(batches, step)
    session.engine.stopwatch.read()
    timed = [_timed_step(session, batches, step) for step in steps[warmup:]]
    seconds = tuple(duration for duration, _ in timed)
    return TrialReport(
        step_seconds=seconds,
        losses=tuple(loss for _, loss in timed),
        samples=sum(step.samples for step in steps[warmup:]),
        text_tokens=sum(step.text_tokens for step in steps[warmup:]),
        vision_units=sum(step.vision_units for step in steps[warmup:]),
        stage=_measure_stage(session, sum(seconds), len(seconds)),
    )


def _timed_step(session: Session, batches: Iterator[MicroBatch], step: Step) -> tuple[float, float]:
    """(seconds, loss) of one step; the loss is a number from the device, so the step is over when it is known."""
    start = time.perf_counter()
    loss = session.step(batches, step)
    return time.perf_counter() - start, loss


def _measure_stage(session: Session, total_seconds: float, steps: int) -> StageMeasurement:
    parts = session.engine.stopwatch.read()
    parameters = list(session.engine.stage.parameters())
    return StageMeasurement(
        stage=session.seat.stage,
        data_rank=session.seat.data_rank,
        load_seconds=parts.get(LOAD, 0.0) / steps,
        forward_seconds=parts[FORWARD] / steps,
        backward_seconds=parts[BACKWARD] / steps,
        optimizer_seconds=parts[OPTIMIZER] / steps,
        idle_seconds=max(0.0, total_seconds - sum(parts.values())) / steps,
        peak_bytes=session.meter.peak_bytes,
        static_bytes=static_bytes(
            sum(parameter.numel() for parameter in parameters),
            parameters[0].element_size(),
            session.request.plan.layout,
        ),
    )
