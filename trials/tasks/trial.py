"""A trial on one rank: warm-up steps, then timed steps until the agent ends it."""

import time
from contextlib import closing
from dataclasses import dataclass

import torch
from deepspeed import comm

from trials import channels
from trials.channels import Channel
from trials.data.epoch import Step
from trials.engine.engine import BACKWARD, FORWARD, LOAD, OPTIMIZER
from trials.engine.memory import module_static_bytes
from trials.outcome import StageMeasurement
from trials.tasks.answer import TrialReport
from trials.tasks.request import Trial
from trials.tasks.session import Session
from trials.tasks.steering import TimedStep, await_verdict, step_name


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """A step that ran."""

    step: Step
    seconds: float
    loss: float


def run_trial(session: Session, task: Trial, channel: Channel) -> TrialReport:
    """Run the steps of `task` and report the timed ones. When it is steered, ask the agent over the channel."""
    epoch = session.epoch(0)
    # Closed here: packs are prepared for steps that may never run, by processes that must end before the report.
    with closing(session.batches(epoch, (*task.warmup_steps, *task.timed_steps))) as batches:
        for number in task.warmup_steps:
            session.step(batches, epoch.step(number))
        session.engine.stopwatch.read()
        steps = [epoch.step(number) for number in task.timed_steps]
        timed: list[_Timed] = []
        for step in steps:
            start = time.perf_counter()
            # The loss is a number from the device, so the step is over when it is known.
            loss = session.step(batches, step)
            timed.append(_Timed(step=step, seconds=time.perf_counter() - start, loss=loss))
            if task.steered and not _goes_on(session, channel, timed, last=len(timed) == len(steps)):
                break
    return TrialReport(
        step_seconds=tuple(each.seconds for each in timed),
        losses=tuple(each.loss for each in timed),
        samples=sum(each.step.samples for each in timed),
        text_tokens=sum(each.step.text_tokens for each in timed),
        vision_units=sum(each.step.vision_units for each in timed),
        stage=_measure_stage(session, sum(each.seconds for each in timed), len(timed)),
    )


def _goes_on(session: Session, channel: Channel, timed: list[_Timed], *, last: bool) -> bool:
    """Return whether to run the next step. Rank 0 asks the agent and broadcasts the answer, so all ranks agree."""
    number = len(timed)
    asks = session.coordinates.rank == 0
    if asks:
        channels.send(channel, step_name(number), TimedStep(seconds=timed[-1].seconds))
    if last:
        return False
    answer = torch.zeros(1, device=next(session.engine.stage.parameters()).device)
    if asks and await_verdict(channel, number).go_on:
        answer += 1
    comm.broadcast(answer, src=0)
    return bool(answer.item())


def _measure_stage(session: Session, total_seconds: float, steps: int) -> StageMeasurement:
    parts = session.engine.stopwatch.read()
    return StageMeasurement(
        stage=session.coordinates.stage,
        data_rank=session.coordinates.data_rank,
        load_seconds=parts.get(LOAD, 0.0) / steps,
        forward_seconds=parts[FORWARD] / steps,
        backward_seconds=parts.get(BACKWARD, 0.0) / steps,
        optimizer_seconds=parts[OPTIMIZER] / steps,
        idle_seconds=max(0.0, total_seconds - sum(parts.values())) / steps,
        peak_bytes=session.meter.peak_bytes,
        static_bytes=module_static_bytes(session.engine.stage.model, session.request.plan.layout),
        tensor_rank=session.coordinates.tensor_rank,
    )
