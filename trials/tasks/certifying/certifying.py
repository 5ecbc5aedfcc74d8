"""The certification of a plan on one rank: steps of the training under the plan, then the same without the plan."""

import gc
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from deepspeed import comm
from torch import nn
from transformers import PreTrainedModel

from trials.arrays import Ints
from trials.certification import GradientComparison, ParameterComparison, SavedCount, StepReport
from trials.data.epoch import PackPart
from trials.data.index import DatasetIndex
from trials.data.loader import MicroBatch, PackDataset, encode
from trials.data.records.sample import IGNORED, Encoded
from trials.engine.state import WEIGHT
from trials.errors import DataError
from trials.job import LoraSection, LossWeighting
from trials.machine.freed_memory import return_freed_memory
from trials.model.plain.dropout import active_dropouts, without_dropout
from trials.plan import Padded
from trials.stage import Stage
from trials.tasks.answer import CertificationReport
from trials.tasks.certifying.inputs import compare_inputs
from trials.tasks.certifying.norms import distance, norm_of, product
from trials.tasks.certifying.reference import (
    Results,
    SharedWeights,
    blank_model,
    build_model,
    model_results,
    set_weights,
)
from trials.tasks.certifying.saved import compare_saved, plain_name, remove_scratch
from trials.tasks.certifying.under_plan import (
    GradientReader,
    PlanRun,
    PlanStep,
    ReadGradients,
    first_unclipped,
    run_plan,
)
from trials.tasks.request import Certification, Request
from trials.tasks.session import Session, open_session

# A choice: a fault of a template or a processor shows in most records.
_COMPARED = 16
"""Records of the first step that each rank compares: their images are prepared twice or three times."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Share:
    """This rank's share of the samples of a step."""

    samples: list[Encoded]
    shares: list[float]
    """Weights of the samples' mean losses in the loss of the step."""
    total_weight: float
    """Sum of the weights of all samples of the step."""
    unreadable: int
    """Samples of the step, over all ranks."""
    read_share: float
    """Sum of the weights of the samples that could be read, as a share of that of all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Reference:
    """A step under the reference, on this rank."""

    exact: Results
    """Results in float32, or in the type of the weights where the reference is the plan's stages."""
    rounded: Results | None
    """Results in the type of the weights."""
    unreadable: int
    """Samples of the step that could not be read, over all ranks."""
    read_share: float
    """As in `_Share`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Certifying:
    """What the comparisons of one rank need."""

    request: Request
    task: Certification
    run: PlanRun
    unclipped: tuple[float, ReadGradients] | None
    """(loss, gradients) of the first step without clipping; None where the job has none."""
    rank: int
    device: torch.device

    @property
    def compared_steps(self) -> tuple[PlanStep, ...]:
        return tuple(self.run.steps[place] for place in self.run.compared)


def run_certification(request: Request, task: Certification, rank: int, device: torch.device) -> CertificationReport:
    """Compare the first steps under the plan with those of `task.reference`, inputs and saved weights included."""
    try:
        return _certified(request, task, rank, device)
    finally:
        remove_scratch(task.scratch, rank)


def _certified(request: Request, task: Certification, rank: int, device: torch.device) -> CertificationReport:
    run = run_plan(request, task, rank, device)
    unclipped = first_unclipped(request, rank, device) if request.job.training.clip_norm is not None else None
    # The reference needs the memory of the engine.
    gc.collect()
    return_freed_memory()
    first = run.steps[0]
    this = _Certifying(request=request, task=task, run=run, unclipped=unclipped, rank=rank, device=device)
    reference = task.reference
    if reference == "transformers" and any(
        _has_video(each.index, row) for each in this.compared_steps for row in _rows(each)
    ):
        reference = "stages"  # the inputs of transformers' own model for a video come from its processor alone
    own_rows = _rows(first)[rank :: comm.get_world_size()][:_COMPARED]
    inputs, faults = compare_inputs(request.job.model, first.index, run.encoder, own_rows.tolist())
    model = build_model(request.job.model, request.job.training, device) if reference == "transformers" else None
    if model is None:
        references = list(_by_stages(this, recomputes=reference == "recomputed-stages"))
    else:
        faults += _dropout_faults(run.dropouts, active_dropouts(model))
        references = list(_by_transformers(this, model))
    results = dict(zip(this.run.compared, references, strict=True))
    saved, of_saved = _saved(this, model)
    return CertificationReport(
        reference=reference,
        steps=tuple(_step_report(this, place, results) for place in range(len(run.steps))),
        epoch=run.epoch,
        inputs=inputs,
        saved=saved,
        faults=(*faults, *run.faults, *of_saved),
    )


def _by_transformers(this: _Certifying, model: PreTrainedModel) -> Iterator[_Reference]:
    """Yield the results of the whole model, behind the first step with the weights of torch's own updates."""
    without_dropout(model)
    own_types = {name: each.dtype for name, each in _tensors(model)}
    for place, each in zip(this.run.compared, this.compared_steps, strict=True):
        if place:
            set_weights(model, SharedWeights(each.weights, dict(model.named_parameters()), this.device))
        share = _share_of(this, each)
        names = each.gradients.values
        wanted = {this.run.tied.get(name, name) for name in names} | set(names)
        rounded = None
        if model.dtype != torch.float32:
            rounded = model_results(model, share.samples, share.shares, wanted.__contains__)
            _set_types(model, dict.fromkeys(own_types, torch.float32))
        exact = model_results(model, share.samples, share.shares, wanted.__contains__)
        _set_types(model, own_types)
        yield _Reference(exact=exact, rounded=rounded, unreadable=share.unreadable, read_share=share.read_share)


def _by_stages(this: _Certifying, *, recomputes: bool) -> Iterator[_Reference]:
    """Yield the results of the plan's stages, with one sample in each micro-batch."""
    request, plan = this.request, this.request.plan
    stages = tuple(replace(stage, further_levels=()) for stage in plan.stages)
    if not recomputes:
        stages = tuple(Stage(vision=stage.vision, language=stage.language) for stage in stages)
    # Clipped later, by the definition.
    training = request.job.training.model_copy(update={"clip_norm": None})
    job = request.job.model_copy(update={"training": training})
    changed = replace(request, job=job, plan=replace(plan, packing=Padded(samples=1), stages=stages))
    like = dict(blank_model(job.model, training).named_parameters(remove_duplicate=False))
    with open_session(changed, this.rank, this.device) as session:
        without_dropout(session.engine.stage)
        reader = GradientReader(session)
        for place, each in zip(this.run.compared, this.compared_steps, strict=True):
            if place:
                _set_stage(session, SharedWeights(each.weights, like, this.device))
            share = _share_of(this, each)
            loss = _sample_by_sample(session, each, share.total_weight)
            read = reader.read()
            norms = [norm_of(gradient) for name, gradient in read.values.items() if not _is_copy(session, name)]
            (squares,) = _summed(this.device, math.hypot(*norms) ** 2)
            exact = Results(loss=loss, gradients=read.values, norm=math.sqrt(squares), reading_errors=read.errors)
            yield _Reference(exact=exact, rounded=None, unreadable=share.unreadable, read_share=share.read_share)


def _sample_by_sample(session: Session, each: PlanStep, total_weight: float) -> float:
    """Run a step with one sample in each micro-batch; return its loss, computed without the engine's own scale."""
    request, rows = session.request, _rows(each)
    data, share = request.plan.layout.data, session.engine.stage.tensor.share
    mine = rows[session.coordinates.data_rank :: data]
    count = -(-len(rows) // data)
    # Every rank runs the same number of micro-batches, so the last one of some is empty.
    packs = [PackPart(rows=mine[number : number + 1], share=share) for number in range(count)]
    dataset = PackDataset(each.index, packs, session.encoder, pixels=session.engine.stage.cut.embeds, padded=True)
    # The weights of the plan's packs are the loader's, which are not asked here.
    targets = each.index.target_tokens[mine].tolist() + [0] * (count - len(mine))
    weights = [_weight_of_target(held, request.job.training.loss_weighting) for held in targets]

    def weighted() -> Iterator[MicroBatch]:
        for number, weight in enumerate(weights):
            batch = dataset[number]
            yield replace(batch, weights=torch.full(batch.labels.shape, weight))

    with session.meter.watch():
        summed, _ = session.engine.evaluate(weighted(), count)
        session.engine.step(weighted(), count, total_weight)
    return summed / total_weight


def _set_stage(session: Session, weights: SharedWeights) -> None:
    """Copy the trained weights that the ranks hold into a stage; every rank must call it."""
    own = dict(session.engine.stage.model.named_parameters())
    for name in weights:
        value = weights.read(name)
        if name in own:
            session.engine.state.write(own[name], WEIGHT, value)


def _is_copy(session: Session, name: str) -> bool:
    """Return whether a parameter is the second copy of a tied weight, which the gradient of the model has once."""
    return name in session.engine.stage.tied and not session.engine.stage.cut.projects


def _saved(this: _Certifying, model: PreTrainedModel | None) -> tuple[SavedCount | None, list[str]]:
    """Compare what the training would write with the weights of the last step; every rank must call it."""
    request, scratch = this.request, this.task.scratch
    if scratch is None:
        return None, []
    settings, training = request.job.model, request.job.training
    blank = blank_model(settings, training)
    like = dict(blank.named_parameters(remove_duplicate=False))
    if training.lora.rank:
        like = {name: each for name, each in like.items() if each.requires_grad}

    def wanted() -> Iterator[tuple[str, torch.Tensor]]:
        weights = SharedWeights(this.run.final, like, this.device)
        for name in weights:
            yield plain_name(name) if training.lora.rank else name, weights.read(name).cpu().to(like[name].dtype)
        if training.lora.rank:
            return
        # One weight under two names, of which the file has one.
        tied = {copy: name for copy, name in this.run.tied.items() if copy not in weights}
        yield from ((copy, weights.read(name).cpu().to(like[name].dtype)) for copy, name in tied.items())
        # What no stage holds, as the folder of the model has it.
        others = {} if model is None else model.state_dict()
        yield from ((name, each.cpu()) for name, each in others.items() if name not in weights and name not in tied)

    def base() -> nn.Module:
        return build_model(settings, training.model_copy(update={"lora": LoraSection()}), torch.device("cpu"))

    return compare_saved(request, scratch, wanted(), base, this.rank)


def _dropout_faults(found: Mapping[str, float], expected: Mapping[str, float]) -> Iterator[str]:
    """Yield the first dropout of the stage that differs from the plain model's."""
    for name, share in found.items():
        if share != expected.get(name, share):
            yield f"the dropout {name} is {share:g} instead of {expected[name]:g}"
            return


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from ((name, each) for name, each in model.named_parameters() if each.is_floating_point())
    yield from ((name, each) for name, each in model.named_buffers() if each.is_floating_point())


def _set_types(model: nn.Module, types: Mapping[str, torch.dtype]) -> None:
    for name, each in _tensors(model):
        each.data = each.data.to(types[name])


def _rows(each: PlanStep) -> Ints:
    return np.sort(np.concatenate([pack for packs in each.step.packs for pack in packs]))


def _share_of(this: _Certifying, each: PlanStep) -> _Share:
    rows = _rows(each)[this.rank :: comm.get_world_size()]
    samples, unreadable = list[Encoded](), list[int]()
    for row in map(int, rows):
        try:
            samples.append(encode(each.index, row, this.run.encoder, pixels=True))
        except DataError:  # the ranks have logged it
            unreadable.append(row)
    # A training divides its loss by the weights of blank samples too.
    targets = [*map(_targets, samples), *map(int, each.index.target_tokens[unreadable])]
    weighting = this.request.job.training.loss_weighting
    weights = np.array([held * _weight_of_target(held, weighting) for held in targets])
    total, read, blank = _summed(this.device, weights.sum(), weights[: len(samples)].sum(), len(unreadable))
    return _Share(
        samples=samples,
        shares=(weights[: len(samples)] / total).tolist(),
        total_weight=total,
        unreadable=int(blank),
        read_share=read / total,
    )


def _has_video(index: DatasetIndex, row: int) -> bool:
    """Return whether a sample holds a video; False for one that can no longer be read, which becomes a blank one."""
    try:
        return bool(index.sample(int(row)).videos)
    except DataError:
        return False


def _targets(sample: Encoded) -> int:
    return int(np.count_nonzero(sample.labels[1:] != IGNORED))


def _weight_of_target(targets: int, weighting: LossWeighting) -> float:
    """Return the weight of each target token of a sample that has `targets` of them.

    Written anew, and not taken from the code of the training, so that a wrong weight there shows.
    """
    if weighting == "token" or not targets:
        return 1.0
    return 1 / targets if weighting == "sample" else 1 / math.sqrt(targets)


def _summed(device: torch.device, *values: float) -> tuple[float, ...]:
    """Return the sums over all ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    comm.all_reduce(total)
    return tuple(total.tolist())


def _step_report(this: _Certifying, place: int, results: Mapping[int, _Reference]) -> StepReport:
    each, clip_norm = this.run.steps[place], this.request.job.training.clip_norm
    gradients = before = None
    if place in results:
        gradients = _comparison(this.run, each, (each.loss, each.gradients), results[place], clip_norm)
    if place == 0 and this.unclipped:
        before = _comparison(this.run, each, this.unclipped, results[0], None)
    return StepReport(
        number=each.number, factor=each.factor, gradients=gradients, before_clipping=before, updates=each.updates
    )


def _comparison(
    run: PlanRun,
    each: PlanStep,
    found: tuple[float, ReadGradients],
    reference: _Reference,
    clip_norm: float | None,
) -> GradientComparison:
    loss, gradients = found
    exact, rounded = reference.exact.clipped(clip_norm), reference.rounded and reference.rounded.clipped(clip_norm)
    # A training logs the mean over the samples that could be read, but divides its gradient by the weights of all.
    read = reference.read_share or 1.0
    return GradientComparison(
        loss=loss,
        expected_loss=exact.loss / read,
        loss_rounding=None if rounded is None else abs(rounded.loss - exact.loss) / read,
        parameters=tuple(_parameters(run, gradients, exact, rounded)),
        samples=len(_rows(each)),
        blank_samples=reference.unreadable,
    )


def _parameters(
    run: PlanRun, gradients: ReadGradients, exact: Results, rounded: Results | None
) -> Iterator[ParameterComparison]:
    for name, gradient in gradients.values.items():
        if name not in exact.gradients and run.tied.get(name) not in exact.gradients:
            continue  # one that the job does not train, whose change is reported
        # The whole model has a tied weight once, under the name of the original.
        expected = _named(exact, name, run.tied)
        yield ParameterComparison(
            name=name,
            part=run.parts[name],
            found=norm_of(gradient),
            expected=norm_of(expected),
            product=product(gradient, expected),
            difference=distance(gradient, expected),
            rounding=None if rounded is None else distance(_named(rounded, name, run.tied), expected),
            reading_error=gradients.errors[name] + exact.reading_errors.get(name, 0.0),
        )


def _named(results: Results, name: str, tied: Mapping[str, str]) -> torch.Tensor:
    found = results.gradients.get(name)
    return results.gradients[tied[name]] if found is None else found
