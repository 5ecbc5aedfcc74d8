"""Steps of the training itself under the plan, each next to torch's own update of the weights."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import nn

from trials.certification import EpochCount, UpdateComparison
from trials.data.epoch import Step
from trials.data.epoch_count import count_epoch
from trials.data.index import DatasetIndex
from trials.data.records.sample import Encoder
from trials.engine.state import WEIGHT, OptimizerState, kept
from trials.job import PARTS
from trials.model.paths import parameters_at
from trials.model.plain.dropout import active_dropouts, without_dropout
from trials.model.stage import StageModule
from trials.tasks.certifying.norms import distance, largest, newest, norm_of
from trials.tasks.certifying.plain_optimizer import PlainAdamW, factors, trains
from trials.tasks.certifying.saved import write_saved
from trials.tasks.request import Certification, Request
from trials.tasks.session import Session, open_session
from trials.tasks.training.course import Course
from trials.tasks.training.output import TrainingRecord
from trials.tasks.training.schedule import Schedule
from trials.tasks.training.settings import training_settings
from trials.tasks.training.training import courses_of, run_steps
from trials.workload import Part

_MOST_FACTORS = 1_000
"""Steps of a long training of which the factor is compared."""
_FEW = 2.0**-26
"""A quarter of a rounding of each float32 number: few are rounded otherwise than in torch's own update."""
_ROUNDED = 2.0**-24
"""Most that a float32 number is rounded, relative to it."""
_SOME = 4 * 2.0**-23
"""Four numbers of a small parameter that are rounded otherwise by one unit in the last place."""
# A choice far above float64's rounding, and far below any difference between two schedules.
_RATE_ERROR = 1e-9
"""Relative: both are computed in float64."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadGradients:
    """Gradients of a stage on the first of its ranks, on others none, by the name of the parameter."""

    values: dict[str, torch.Tensor]
    """After clipping, float32 on the CPU."""
    errors: dict[str, float]
    """Most that the reading may have changed them, as norms."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanStep:
    """A step under the plan, on one rank."""

    number: int
    """In the training, from 0."""
    factor: float
    """Factor of the learning rates, by the definition of the schedule."""
    loss: float
    step: Step
    index: DatasetIndex
    gradients: ReadGradients
    """Only of steps in `PlanRun.compared`: those of all take more memory."""
    weights: dict[str, torch.Tensor]
    """Weights of the reference before the step, float32 on the CPU: of the same ranks and steps, but none of the first
    step, which has those of the model."""
    updates: tuple[UpdateComparison, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanRun:
    """What the plan has done, on one rank."""

    steps: tuple[PlanStep, ...]
    parts: dict[str, Part]
    tied: dict[str, str]
    final: dict[str, torch.Tensor]
    """Weights of the stage after the last step, in their own type on the CPU; of the same ranks."""
    dropouts: dict[str, float]
    epoch: EpochCount
    encoder: Encoder
    faults: tuple[str, ...]

    @property
    def compared(self) -> tuple[int, ...]:
        """Places in `steps` of those whose gradients are compared."""
        return _compared(len(self.steps))


class GradientReader:
    """The gradients of a stage's steps, as AdamW got them: from its first moment.

    The moment is `beta1` times the one before plus `1 - beta1` times the gradient, whichever engine and ZeRO stage have
    averaged and split it. Each moment is rounded to float32, so a gradient far smaller than the ones before, such as
    that of a weight that began as zeros in front of a norm, is known to few digits.
    """

    def __init__(self, session: Session) -> None:
        self._session, self._before = session, dict[str, torch.Tensor]()

    def read(self) -> ReadGradients:
        """Return the gradients of the last step; every rank must call it after each step."""
        session, beta = self._session, self._session.request.job.training.betas[0]
        moments = kept(
            (
                (name, session.engine.state.read(parameter, "exp_avg").float().to("cpu", copy=True))
                for name, parameter in session.engine.stage.model.named_parameters()
                if parameter.requires_grad
            ),
            keeps=session.coordinates.leads_stage,
        )
        before, self._before = self._before, moments
        errors = {
            name: _ROUNDED * (norm_of(moment) + norm_of(before[name])) / (1 - beta) if before else 0.0
            for name, moment in moments.items()
        }
        values = {name: newest(moment, before.get(name), beta) for name, moment in moments.items()}
        return ReadGradients(values=values, errors=errors)


def run_plan(request: Request, task: Certification, rank: int, device: torch.device) -> PlanRun:
    """Run steps of the training, and write the weights after the last to `task.scratch`. Every rank must call it."""
    with open_session(request, rank, device) as session:
        stage, training = session.engine.stage, request.job.training
        dropouts = active_dropouts(stage.model)
        without_dropout(stage)
        record = _record(request, session.index)
        course, schedule = courses_of(session, record)
        total = min(course.steps, training.max_steps or course.steps)
        numbers = _numbers(schedule, total) if task.follows else (0,)
        parts, state, leads = parts_of(stage), session.engine.state, session.coordinates.leads_stage
        trained = {name for name, part in parts.items() if trains(training, name, part)}
        idle = sorted(
            name for name, each in stage.model.named_parameters() if name in trained and not each.requires_grad
        )
        begun = kept(_weights(stage.model, state), keeps=leads)
        plain = PlainAdamW(
            {name: weight.float() for name, weight in begun.items() if name in trained.difference(idle)},
            {name: training.learning_rate_of(part) for name, part in parts.items()},
            training,
            device,
        )
        faults = [f"{name} is not trained, although the job trains it" for name in idle[:1]]
        faults += _schedule_faults(session, schedule, total)
        reader, steps = GradientReader(session), list[PlanStep]()
        compared = {numbers[place] for place in _compared(len(numbers))}
        for number, factor in zip(numbers, factors(training, total, numbers), strict=True):
            with closing(run_steps(session, course, range(number, number + 1), schedule)) as run:
                ((progress, _, _),) = run
            gradients = reader.read()
            is_compared = number in compared
            before = dict(plain.weights) if number and is_compared else {}
            plain.update(gradients.values, factor)
            faults += _rate_faults(state, plain, factor, number, training.learning_rate)
            found = kept(_master_weights(stage.model, state), keeps=leads)
            faults += _stale(stage.model, state, number)
            steps.append(
                PlanStep(
                    number=number,
                    factor=factor,
                    loss=progress.loss,
                    step=_step(session, course, number),
                    index=session.index,
                    gradients=_of(plain.weights, gradients) if is_compared else ReadGradients(values={}, errors={}),
                    weights=before,
                    updates=tuple(_updates(found, begun, plain, parts)),
                )
            )
        final = kept(_weights(stage.model, state), keeps=leads)
        moved = [name for name, weight in final.items() if name not in trained and not torch.equal(weight, begun[name])]
        if moved:
            faults.append(f"{moved[0]} has changed, although the job does not train it ({len(moved)} such weights)")
        if task.scratch is not None:
            write_saved(session, task.scratch, record, len(steps))
        return PlanRun(
            steps=tuple(steps),
            parts=parts,
            tied=stage.tied,
            final=final,
            dropouts=dropouts,
            epoch=count_epoch(session.epoch(0)),
            encoder=session.encoder,
            faults=tuple(faults),
        )


def first_unclipped(request: Request, rank: int, device: torch.device) -> tuple[float, ReadGradients]:
    """Return (loss, gradients) of the first step without clipping, as `PlanStep` has them. Every rank must call it."""
    training = request.job.training.model_copy(update={"clip_norm": None})
    request = replace(request, job=request.job.model_copy(update={"training": training}))
    with open_session(request, rank, device) as session:
        without_dropout(session.engine.stage)
        record = _record(request, session.index)
        course, schedule = courses_of(session, record)
        with closing(run_steps(session, course, range(1), schedule)) as run:
            ((progress, _, _),) = run
        return progress.loss, GradientReader(session).read()


def _record(request: Request, index: DatasetIndex) -> TrainingRecord:
    """Return the record of the training that the steps are of."""
    return TrainingRecord(id="0" * 16, settings=training_settings(request, index), plan=request.plan)


def _numbers(schedule: Schedule, total: int) -> tuple[int, ...]:
    """Return the steps that are run: the first two, and two more where a schedule has lowered the rates of most steps.

    In a warm-up the first rate is 0 and those behind it are small: the second step has the first weights, and its
    update may be rounding alone.
    """
    late = min(schedule.warmup + 3 * (total - schedule.warmup) // 4, total - 2)
    further = {late, late + 1} if schedule.warmup or schedule.name != "constant" else set[int]()
    return tuple(sorted({number for number in {0, 1} | further if 0 <= number < total}))


def _compared(steps: int) -> tuple[int, ...]:
    """Return the places, among the steps that run, of those whose gradients are compared.

    The first one has the first weights. Errors that come with an update show in the last one.
    """
    return tuple(dict.fromkeys((0, steps - 1)))


def parts_of(stage: StageModule) -> dict[str, Part]:
    """Return the part of the model to which each parameter of the stage belongs."""
    chain = stage.chain
    parts = {path: part for part in PARTS for path in chain.paths_of(part)}
    return {name: parts[path] for path in stage.paths for name, _ in parameters_at(stage.model, path)}


def _of(names: Iterable[str], gradients: ReadGradients) -> ReadGradients:
    """Return the gradients of these parameters."""
    return replace(gradients, values={name: gradients.values[name] for name in names})


def _weights(model: nn.Module, state: OptimizerState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of the weights with which the model computes."""
    return ((name, state.working(each).to("cpu", copy=True)) for name, each in model.named_parameters())


def _master_weights(model: nn.Module, state: OptimizerState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield copies of the float32 weights that train."""
    return (
        (name, state.read(each, WEIGHT).float().to("cpu", copy=True))
        for name, each in model.named_parameters()
        if each.requires_grad
    )


def _stale(model: nn.Module, state: OptimizerState, number: int) -> Iterator[str]:
    """Yield the first weight with which the model computes that is not what the optimizer has made of it."""
    found = []
    for name, each in model.named_parameters():  # every rank of the stage must read all
        if each.requires_grad and not torch.equal(state.working(each), state.read(each, WEIGHT).to(each.dtype)):
            found.append(name)
    if found:
        yield f"after step {number + 1} the model computes with another {found[0]} than its optimizer has"


def _updates(
    found: Mapping[str, torch.Tensor], begun: Mapping[str, torch.Tensor], plain: PlainAdamW, parts: Mapping[str, Part]
) -> Iterator[UpdateComparison]:
    for name, weight in plain.weights.items():
        yield UpdateComparison(
            name=name,
            part=parts[name],
            change=distance(weight, begun[name]),
            difference=distance(found[name], weight),
            rounding=math.hypot(_FEW * norm_of(weight), _SOME * largest(weight)),
        )


def _rate_faults(state: OptimizerState, plain: PlainAdamW, factor: float, number: int, usual: float) -> Iterator[str]:
    """Yield a difference of the (learning rate, weight decay) of the optimizer's groups from what the job says."""
    # A rank that does not lead its stage has no weights to tell which settings it must have.
    wanted = {(rate * factor, decay) for rate, decay in plain.settings.values()}
    if not wanted:
        return
    found = state.rates
    for place, name in enumerate(("learning rate", "weight decay")):
        of_plan, of_job = (sorted({each[place] for each in pairs}) for pairs in (found, wanted))
        if len(of_plan) != len(of_job) or any(
            abs(one - other) > _RATE_ERROR * max(abs(other), _RATE_ERROR * usual)
            for one, other in zip(of_plan, of_job, strict=True)
        ):
            yield f"the {name} in step {number + 1} is {_listed(of_plan)} instead of {_listed(of_job)}"


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.8g}" for value in values)


def _schedule_faults(session: Session, schedule: Schedule, total: int) -> Iterator[str]:
    """Yield the first step whose factor of the learning rates differs from the schedule's definition."""
    training = session.request.job.training
    if not training.curriculum.steps:  # with it, the steps of the first epoch follow from its course alone
        every = sum(session.epoch(number).steps for number in range(training.epochs))
        if (expected := min(every, training.max_steps or every)) != total:
            yield f"the training has {total} steps instead of {expected}"
    near = {edge + each for edge in (0, schedule.warmup, total) for each in range(-3, 4)}
    spread = range(0, total, max(1, total // _MOST_FACTORS))
    steps = sorted(each for each in near | set(spread) if 0 <= each < total)
    for step, factor in zip(steps, factors(training, total, steps), strict=True):
        if abs((found := schedule.factor(step + 1)) - factor) > _RATE_ERROR:
            rates = f"{found:.6g} times the learning rate instead of {factor:.6g}"
            yield f"the schedule gives step {step + 1} of {total} {rates}"
            return


def _step(session: Session, course: Course, number: int) -> Step:
    stretch = next(each for each in course.stretches if each.before <= number < each.before + each.steps)
    return session.build(stretch.epoch, stretch.plan, stretch.order).step(number - stretch.before)
