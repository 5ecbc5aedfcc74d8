"""A trial on one rank: warm-up steps, then timed steps until the agent ends it."""

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import fmean

import torch
from deepspeed import comm

from trials import channels
from trials.channels import Channel
from trials.data.epoch import Step
from trials.data.loader import MicroBatch
from trials.engine.base import BACKWARD, FORWARD, LOAD, OPTIMIZER
from trials.engine.compiled import compiled_graphs
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
    parts: Mapping[str, float]
    """Seconds of the sections of the stopwatch."""
    loss: float


def run_trial(session: Session, task: Trial, channel: Channel) -> TrialReport:
    """Run the steps of `task` and report the timed ones. When it is steered, ask the agent over the channel."""
    timed: list[_Timed] = []
    # A device holds them in every step of a training but the first, and the first step of a trial is the heaviest.
    session.engine.state.create_moments(steps=0)
    with closing(_timed_steps(session, task)) as steps:
        for step in steps:
            timed.append(step)
            if task.steered and not _goes_on(session, channel, timed, last=len(timed) == len(task.timed_steps)):
                break
    blank = session.take_blank()
    return TrialReport(
        step_seconds=tuple(each.seconds for each in timed),
        losses=tuple(each.loss for each in timed),
        samples=sum(each.step.samples for each in timed),
        text_tokens=sum(each.step.text_tokens for each in timed),
        vision_units=sum(each.step.vision_units for each in timed),
        stage=_measure_stage(session, timed),
        blank_samples=len(blank),
        blank_reason=blank[0].reason if blank else "",
    )


def _timed_steps(session: Session, task: Trial) -> Generator[_Timed, None, None]:
    """Run the steps of `task`, and yield the timed ones.

    A step in which a rank compiles layers takes longer than in a training: it is run again, after the warm-up steps.
    """
    epoch, left = session.epoch(0), [*task.timed_steps]
    while left:
        # Closed here: packs are prepared for steps that may never run, by processes that must end before the report.
        with closing(session.batches(epoch, (*task.warmup_steps, *left))) as batches:
            for number in task.warmup_steps:
                session.step(batches, epoch.step(number))
            # Reading resets the stopwatch: warm-up steps do not count.
            session.engine.stopwatch.read()
            for number in tuple(left):
                graphs = compiled_graphs()
                timed = _time(session, batches, epoch.step(number))
                if session.request.job.training.compile and _any_rank(session, compiled_graphs() > graphs):
                    break
                left.remove(number)
                yield timed


def _time(session: Session, batches: Iterator[MicroBatch], step: Step) -> _Timed:
    start = time.perf_counter()
    # The loss is a number from the device, so the step is over when it is known.
    loss = session.step(batches, step)
    seconds = time.perf_counter() - start
    return _Timed(step=step, seconds=seconds, parts=session.engine.stopwatch.read(), loss=loss)


def _any_rank(session: Session, here: bool) -> bool:
    """Return whether something is so on any rank; every rank must call it."""
    found = torch.tensor(float(here), device=session.device)
    comm.all_reduce(found)
    return bool(found.item())


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


def _measure_stage(session: Session, timed: Sequence[_Timed]) -> StageMeasurement:
    load, forward, backward, optimizer = (
        fmean(each.parts.get(section, 0.0) for each in timed) for section in (LOAD, FORWARD, BACKWARD, OPTIMIZER)
    )
    return StageMeasurement(
        stage=session.coordinates.stage,
        data_rank=session.coordinates.data_rank,
        load_seconds=load,
        forward_seconds=forward,
        backward_seconds=backward,
        optimizer_seconds=optimizer,
        idle_seconds=max(0.0, fmean(each.seconds for each in timed) - load - forward - backward - optimizer),
        peak_bytes=session.meter.peak_bytes,
        static_bytes=module_static_bytes(session.engine.stage.model, session.request.plan.layout),
        tensor_rank=session.coordinates.tensor_rank,
    )
