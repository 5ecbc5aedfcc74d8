"""The certification of a plan on one rank: one real step under the plan, then the same samples without its packing."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from deepspeed import comm

from trials.certification import EpochCount, ParameterComparison
from trials.data.epoch import PackPart, Step
from trials.data.epoch_count import count_epoch
from trials.data.index import DatasetIndex
from trials.data.loader import PackDataset, encode
from trials.data.loss_weights import sample_weights
from trials.data.records.sample import IGNORED, Encoded, Encoder, Ints
from trials.engine.state import kept
from trials.errors import DataError
from trials.model.paths import parameters_at
from trials.model.stage import StageModule
from trials.plan import Padded, Stage
from trials.tasks.answer import CertificationReport
from trials.tasks.certifying.reference import Results, build_model, model_results, without_dropout
from trials.tasks.request import Certification, Request
from trials.tasks.session import Session, open_session
from trials.workload import Part


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Found:
    """A step under the plan, on one rank."""

    results: Results
    """With the gradients of the stage on the first of the ranks that hold the same parameters; on others with none."""
    parts: dict[str, Part]
    tied: dict[str, str]
    epoch: EpochCount
    step: Step
    index: DatasetIndex
    encoder: Encoder


def run_certification(request: Request, task: Certification, rank: int, device: torch.device) -> CertificationReport:
    """Compare the gradients of `task.step` under the plan with those of `task.reference`."""
    # Clipping depends on the norm of the whole gradient: with it, one wrong part would change all others.
    training = request.job.training.model_copy(update={"clip_norm": None})
    request = replace(request, job=request.job.model_copy(update={"training": training}))
    found = _under_plan(request, task, rank, device)
    # The reference needs the memory of the engine.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    rows = np.sort(np.concatenate([pack for packs in found.step.packs for pack in packs]))
    samples, unreadable = _encoded(found, rows[rank :: comm.get_world_size()])
    # A training divides its loss by the weights of blank samples too.
    targets = np.array([*map(_targets, samples), *found.index.target_tokens[unreadable]], dtype=np.int64)
    weights = sample_weights(targets, training.loss_weighting)
    total_weight, blank_samples = _summed(device, weights.sum(), len(unreadable))
    reference = task.reference
    if reference == "transformers" and any(_has_video(found.index, int(row)) for row in rows):
        reference = "stages"  # the inputs of transformers' own model for a video come from its processor alone
    if reference == "transformers":
        shares = (weights[: len(samples)] / total_weight).tolist()
        rounded, exact = _by_transformers(request, found, samples, shares, device)
    else:
        recomputes = reference == "recomputed-stages"
        rounded, exact = None, _by_stages(request, rows, total_weight, rank, device, recomputes=recomputes)
    return CertificationReport(
        reference=reference,
        loss=found.results.loss,
        expected_loss=exact.loss,
        loss_rounding=None if rounded is None else abs(rounded.loss - exact.loss),
        parameters=tuple(_comparisons(found, exact, rounded)),
        epoch=found.epoch,
        samples=len(rows),
        blank_samples=int(blank_samples),
    )


def _under_plan(request: Request, task: Certification, rank: int, device: torch.device) -> _Found:
    with _session(request, rank, device) as session:
        epoch = session.epoch(0)
        step = epoch.step(task.step)
        with closing(session.batches(epoch, (task.step,))) as batches:
            loss = session.step(batches, step)
        stage = session.engine.stage
        return _Found(
            results=Results(loss=loss, gradients=_gradients(session)),
            parts=_parts(stage),
            tied=stage.tied,
            epoch=count_epoch(epoch),
            step=step,
            index=session.index,
            encoder=session.encoder,
        )


@contextmanager
def _session(request: Request, rank: int, device: torch.device) -> Iterator[Session]:
    with open_session(request, rank, device) as session:
        without_dropout(session.engine.stage)
        yield session


def _gradients(session: Session) -> dict[str, torch.Tensor]:
    """Return the gradients of the stage after its first step, as AdamW got them: from its first moment.

    It is (1 - beta1) times the gradient then, whichever engine and ZeRO stage have averaged and split it. Every rank
    must call it; the first of those with the same parameters gets them.
    """
    share, state = 1 - session.request.job.training.betas[0], session.engine.state
    gradients = (
        (name, state.read(parameter, "exp_avg").float().cpu() / share)
        for name, parameter in session.engine.stage.model.named_parameters()
        if parameter.requires_grad
    )
    return kept(gradients, keeps=session.coordinates.leads_stage)


def _parts(stage: StageModule) -> dict[str, Part]:
    """Return the part of the model to which each parameter of the stage belongs."""
    chain = stage.chain
    # The word embedding, last of the projector's paths, belongs to the language model.
    parts: dict[str, Part] = dict.fromkeys((*chain.vision_embedding, *chain.vision_layers), "vision")
    parts |= dict.fromkeys(chain.projector[:-1], "projector")
    return {name: parts.get(path, "language") for path in stage.paths for name, _ in parameters_at(stage.model, path)}


def _has_video(index: DatasetIndex, row: int) -> bool:
    """Return whether a sample holds a video; False for one that can no longer be read, which becomes a blank one."""
    try:
        return bool(index.sample(row).videos)
    except DataError:
        return False


def _encoded(found: _Found, rows: Ints) -> tuple[list[Encoded], list[int]]:
    """Return the samples that can be read, and the rows of the others, which a training replaces by blank ones."""
    samples, unreadable = [], []
    for row in map(int, rows):
        try:
            samples.append(encode(found.index, row, found.encoder, pixels=True))
        except DataError:  # the ranks have logged it
            unreadable.append(row)
    return samples, unreadable


def _targets(sample: Encoded) -> int:
    return int(np.count_nonzero(sample.labels[1:] != IGNORED))


def _summed(device: torch.device, *values: float) -> tuple[float, ...]:
    """Return the sums over all ranks."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    comm.all_reduce(total)
    return tuple(total.tolist())


def _by_transformers(
    request: Request, found: _Found, samples: Sequence[Encoded], shares: Sequence[float], device: torch.device
) -> tuple[Results | None, Results]:
    """Return the results in the type of the weights, unless that is float32, and in float32.

    They have the gradients that this rank has found itself.
    """
    wanted = {found.tied.get(name, name) for name in found.results.gradients} | set(found.results.gradients)
    model = build_model(request.job.model, request.job.training, device)
    without_dropout(model)
    rounded = None
    if model.dtype != torch.float32:
        rounded = model_results(model, samples, shares, wanted.__contains__)
        model.float()
    return rounded, model_results(model, samples, shares, wanted.__contains__)


def _by_stages(
    request: Request, rows: Ints, total_weight: float, rank: int, device: torch.device, *, recomputes: bool
) -> Results:
    """Return the results of the plan's stages with one sample in each micro-batch."""
    plan = request.plan
    stages = tuple(replace(stage, further_levels=()) for stage in plan.stages)
    if not recomputes:
        stages = tuple(Stage(vision=stage.vision, language=stage.language) for stage in stages)
    plan = replace(plan, packing=Padded(samples=1), stages=stages)
    data = plan.layout.data
    with _session(replace(request, plan=plan), rank, device) as session:
        mine = [row[None] for row in rows[session.coordinates.data_rank :: data]]
        count = -(-len(rows) // data)
        # Every rank runs the same number of micro-batches, so the last one of some is empty.
        share = session.engine.stage.tensor.share
        packs = [PackPart(rows=pack, share=share) for pack in (*mine, *(rows[:0],) * (count - len(mine)))]
        pixels = session.engine.stage.cut.embeds
        weighting = request.job.training.loss_weighting
        dataset = PackDataset(session.index, packs, session.encoder, pixels=pixels, padded=True, weighting=weighting)
        with session.meter.watch():
            loss = session.engine.step((dataset[number] for number in range(count)), count, total_weight)
        return Results(loss=loss, gradients=_gradients(session))


def _comparisons(found: _Found, exact: Results, rounded: Results | None) -> Iterator[ParameterComparison]:
    for name, gradient in found.results.gradients.items():
        # The whole model has a tied weight once, under the name of the original.
        expected = _named(exact, name, found.tied)
        yield ParameterComparison(
            name=name,
            part=found.parts[name],
            found=_norm(gradient),
            expected=_norm(expected),
            product=float(torch.dot(gradient.flatten().double(), expected.flatten().double())),
            difference=_norm(gradient - expected),
            rounding=None if rounded is None else _norm(_named(rounded, name, found.tied) - expected),
        )


def _named(results: Results, name: str, tied: dict[str, str]) -> torch.Tensor:
    found = results.gradients.get(name)
    return results.gradients[tied[name]] if found is None else found


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.double()))
